"""After an interrupt or a restart, ranks or their loader workers live on and hold memory; a second press breaks the clean-up itself.

pytorch/pytorch#36136, jupyter/jupyter_client#104
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.cases import shown
from tests.kernels import Kernel

CELLS = """
import ddpkit, pathlib, signal, time
from torch.utils.data import DataLoader

def long_run(rank, asked):
    signal.signal(signal.SIGTERM, lambda *_: asked.touch())      # asked to end, and does not
    for number, _ in enumerate(DataLoader(list(range(10_000)), num_workers=1)):
        if number == 0:
            print("has a batch")
        time.sleep(0.05)

def hello(rank):
    return rank
asked = pathlib.Path({asked!r})
"""


def below(pid):
    return set(psutil.Process(pid).children(recursive=True))


def start_long_run(kernel, method="forkserver"):
    """Returns the cell's message, and the processes that it has started."""
    kernel.check(f"assert ddpkit.spawn(hello, start_method={method!r}).values == [0, 1]")
    before = below(kernel.pid)
    running = kernel.start(f"ddpkit.spawn(long_run, (asked,), start_method={method!r})", allow_stdin=True)
    shown(kernel, running, "rank 0 │ has a batch", "rank 1 │ has a batch")
    started = below(kernel.pid) - before
    assert len(started) >= 5  # an agent, two ranks, two workers
    return running, started


def wait_for(file):
    deadline = time.monotonic() + 10
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert file.exists()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_stop_button_once_and_twice(method, tmp_path):
    asked = tmp_path / "asked"
    with Kernel() as kernel:
        kernel.check(CELLS.format(asked=str(asked)))
        for presses in (1, 2):
            running, started = start_long_run(kernel, method)
            kernel.manager.interrupt_kernel()
            wait_for(asked)
            if presses == 2:  # by somebody impatient, in the middle of the clean-up
                kernel.manager.interrupt_kernel()
            cell = kernel.finish(running, timeout=30)
            assert cell.error == "KeyboardInterrupt" and cell.seconds < 10
            assert psutil.wait_procs(started, timeout=5)[1] == []  # no rank, no worker, no zombie
            kernel.check(f"assert ddpkit.spawn(hello, start_method={method!r}).values == [0, 1]")
            asked.unlink()


def test_a_killed_kernel_takes_everything_with_it(tmp_path):
    with Kernel() as kernel:
        kernel.check(CELLS.format(asked=str(tmp_path / "asked")))
        start_long_run(kernel)
        everything = below(kernel.pid)
        os.kill(kernel.pid, signal.SIGKILL)
        alive = psutil.wait_procs(everything, timeout=10)[1]
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
