"""The notebook saved as a script starts itself again in each child, with a text about freezing programs; %run misses a __spec__.

pytorch/pytorch#5858, spyder-ide/spyder#8128
"""

from __future__ import annotations

import pytest

from tests.cases import program

SCRIPT = """
import sys

import ddpkit

print("top level")

class Config:
    width = 3

def hello(rank, config):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    return rank, config.width, type(config).__module__

{guard}print(ddpkit.spawn(hello, (Config(),), start_method={method!r}).values)
"""
GUARD = 'if __name__ == "__main__": '
RIGHT = "top level\n[(0, 3, '__main__'), (1, 3, '__main__')]\n"


@pytest.mark.parametrize("guard", [GUARD, ""], ids=["with a main guard", "without"])
def test_a_script_runs_once(guard, start_method, tmp_path):
    done = program(tmp_path, SCRIPT.format(guard=guard, method=start_method))
    assert (done.stdout, done.stderr, done.returncode) == (RIGHT, "", 0)


@pytest.mark.parametrize("guard", [GUARD, ""], ids=["with a main guard", "without"])
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_script_runs_in_a_notebook(guard, kernel, method, tmp_path):
    file = tmp_path / "exported.py"
    file.write_text(SCRIPT.format(guard=guard, method=method))
    cell = kernel.check(f"%run {file}")
    assert cell.stream == RIGHT and cell.displays == []
