"""Faults that never end by themselves end with an interrupt of the kernel."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

import ddpkit
from ddpkit import supervise
from tests.kernels import Kernel
from tests.leftovers import still_alive


def stopped_below(pid):
    """The processes below this one that are stopped (SIGSTOP), once there are any."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := [p for p in psutil.Process(pid).children(recursive=True) if p.status() == psutil.STATUS_STOPPED]:
            return found
        time.sleep(0.01)
    raise TimeoutError("no process is stopped")


def test_a_stopped_rank_is_not_stuck_and_can_be_interrupted():
    """A debugger stops processes as well. Whoever runs the cell ends it when he likes."""
    with Kernel() as kernel:
        kernel.check("import ddpkit, os, signal, psutil\nddpkit.spawn(abs, nprocs=1)")
        kernel.check("""
def train(rank):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("pid", os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
""")
        running = kernel.start("ddpkit.spawn(train)", allow_stdin=True)
        kernel.finish(running, until="rank 1 │ pid")
        ranks = stopped_below(kernel.pid)
        kernel.manager.interrupt_kernel()
        cell = kernel.finish(running, timeout=30)
        assert cell.error == "KeyboardInterrupt" and cell.seconds < 3
        assert still_alive(ranks, 3) == []
        kernel.check("assert ddpkit.spawn(lambda rank: rank).values == [0, 1]")


@pytest.fixture
def harmless():
    """Ctrl-C does nothing here, outside of runs: presses may come before and after one."""
    handler = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("start", ["at once", "when the ranks run"])
def test_a_button_pressed_a_hundred_times(start, harmless, nothing_left, tmp_path):
    """No press may break the clean-up after an earlier one."""

    def train(rank, here):
        (here / str(rank)).touch()
        while True:
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                pass

    def press():
        while start == "when the ranks run" and not all((tmp_path / str(rank)).exists() for rank in range(2)):
            time.sleep(0.001)
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.002)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        ddpkit.spawn(train, (tmp_path,), view=False)
    pressing.join()
    assert signal.getsignal(signal.SIGINT) is harmless
    assert ddpkit.spawn(lambda rank: rank, view=False).values == [0, 1]


loading = threading.Event()


def load_for_ever():
    loading.set()
    while True:
        time.sleep(0.01)


class Slow:
    def __reduce__(self):
        return load_for_ever, ()


def test_a_value_that_takes_for_ever_to_unpickle(harmless, nothing_left, monkeypatch):
    """Code of the user's own runs in the notebook then. A second press ends it."""
    monkeypatch.setattr(supervise, "PATIENCE", 0.5)

    def make(rank):
        from tests.faults.test_interrupted import Slow

        return Slow()

    def press():
        if loading.wait(60):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        ddpkit.spawn(make, nprocs=1, view=False)
