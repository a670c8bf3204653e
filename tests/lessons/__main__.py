"""Run lessons and save what they show: `python -m tests.lessons notebooks/00_start_here.ipynb …` (all of them without arguments).

The saved outputs are the truth that `pytest --nbval` compares with. Cells get no times, and keep their names (ids), so that a change of a
notebook shows what has changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbval.plugin import coalesce_streams

METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def record(path: Path) -> None:
    """Run one notebook from top to bottom in a new kernel and save it."""
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(book, timeout=300, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in book.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter")}
        if cell.cell_type == "code":
            cell.outputs = coalesce_streams(cell.outputs)
    book.metadata = METADATA
    nbformat.write(book, path)


def main() -> None:
    """Record the notebooks that are named, or all."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    for path in paths:
        record(path)
        print(f"recorded {path}")


if __name__ == "__main__":
    main()
