"""`%ranks` and `%%ranks` in a real kernel."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.kernels import Kernel
from tests.leftovers import still_alive


@pytest.fixture(scope="module")
def ranked(kernel):
    kernel.check("%load_ext ddpkit")
    yield kernel
    kernel.run("%ranks stop")


@pytest.fixture
def running(ranked):
    ranked.check("%ranks 2")
    return ranked


JOIN = "%%ranks\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()"


def test_a_cell_runs_in_all_ranks_and_shows_one_block(running):
    assert running.check(JOIN).shown == ""
    cell = running.check("%%ranks\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nx.tolist()")
    (display,) = cell.displays
    assert display["text/plain"] == "ranks 0, 1 │ [1.0, 1.0]" and "ranks 0, 1" in display["text/html"] and cell.result is None
    cell = running.check("%%ranks 1\nprint('only here', rank)")
    assert cell.shown == "rank 1 │ only here 1"
    assert running.check("'x' in globals()").result == {"text/plain": "False"}  # the notebook's own names are untouched


def test_a_persons_view_is_live_and_ends_in_the_same_block(running):
    cell = running.check("%%ranks\nimport time, os\nfor i in range(3):\n    print(i)\n    time.sleep(0.2)", allow_stdin=True)
    assert len(cell.updates) >= 1
    assert cell.updates[-1]["text/plain"] == "ranks 0, 1 │ 0\nranks 0, 1 │ 1\nranks 0, 1 │ 2"


def test_a_failure_names_the_rank_and_the_line_of_the_notebooks_cell(running):
    cell = running.run("%%ranks\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')  # the fault")
    assert cell.error == "RankFailed"
    assert (
        f"rank 1 of 2 failed: ValueError: no luck\n  Cell In[{cell.number}], line 4\n      raise ValueError('no luck')  # the fault" in cell.traceback
    )
    assert "magics.py" not in cell.traceback and "IPython" not in cell.traceback
    assert running.check("%%ranks 0\n1").shown == "rank 0 │ 1"


def test_the_card_the_stop_and_the_restart(running):
    running.check("%%ranks\nx = 1")
    card = running.check("%ranks", allow_stdin=True)
    assert card.displays[0]["text/plain"] == "2 ranks: 2 idle" and "MB</td>" in card.displays[0]["text/html"]
    assert "2 ranks started anew" in running.check("%ranks restart").stream
    assert running.run("%%ranks\nx").error == "RankFailed"
    running.check("%ranks stop")
    for line in ("%ranks", "%ranks stop", "%%ranks\n1"):
        assert "No ranks run. Start some first: %ranks 4" in running.run(line).shown
    assert "is not known" in running.run("%ranks four").shown
    running.check("%ranks 3")
    assert "is not known" in running.run("%%ranks one\n1").shown
    assert running.check("%%ranks 0-1,2\nimport os; os.environ['WORLD_SIZE']").shown == "ranks 0–2 │ '3'"
    assert running.run("%%ranks 3\n1").error == "ValueError"


def test_an_interrupt_stops_the_cell_and_not_the_ranks(running):
    running.check("%%ranks\nx = 5")
    cell = running.start("%%ranks\nimport time\nprint('begins')\nwhile True:\n    time.sleep(0.01)", allow_stdin=True)
    running.finish(cell, until="begins")
    running.manager.interrupt_kernel()
    done = running.finish(cell, timeout=30)
    assert done.error == "KeyboardInterrupt" and done.seconds < 3
    assert running.check("%%ranks\nx").shown == "ranks 0, 1 │ 5"


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_forgotten_ranks_do_not_outlive_the_kernel(how):
    with Kernel() as kernel:
        kernel.check("%load_ext ddpkit\n%ranks 2")
        started = psutil.Process(kernel.pid).children(recursive=True)
        assert len(started) >= 4
        if how == "killed":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.manager.shutdown_kernel(now=False)
        assert still_alive(started, 10) == []
