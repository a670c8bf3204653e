"""Progress bars come as a thousand lines, warnings carry process numbers, output is cut by chance: a notebook that is tested fails by chance.

computationalmodelling/nbval#102, tqdm/tqdm#485
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cases import ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("tqdm")

CELLS = [
    "import warnings\nimport ddpkit\nimport torch\nimport torch.distributed as dist",
    """def bars(rank):
    from tqdm.auto import tqdm
    dist.init_process_group("gloo")
    n = 0
    for _ in tqdm(range(50), desc=f"rank {rank}"):
        n += 1
    warnings.warn(f"a warning of rank {rank}")
    return n""",
    "run = ddpkit.spawn(bars)\nprint(run.values)\nassert run.values == [50, 50]",
]


@pytest.mark.long
def test_stored_and_new_output_agree(tmp_path):
    import nbclient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbclient.NotebookClient(book, timeout=60).execute()
    outputs = book.cells[-1].outputs
    assert [output.output_type for output in outputs] == ["display_data", "stream"]
    assert outputs[1]["name"] == "stdout" and outputs[1]["text"] == "[50, 50]\n"
    lines = outputs[0]["data"]["text/plain"].splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"rank {rank} │ ")]
        assert len([line for line in mine if "/50 [" in line]) == 1 and "100%" in mine[0]  # one bar, in its last state
        assert len([line for line in mine if f"UserWarning: a warning of rank {rank}" in line]) == 1
    everything = "\n".join(lines)
    assert "fork" not in everything and "destroy_process_group" not in everything
    paths = [tmp_path / "first.ipynb", tmp_path / "second.ipynb"]
    for path in paths:
        nbformat.write(book, path)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-q", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout[-3000:]
