"""Faults that never end by themselves end with an interrupt of the kernel."""

from __future__ import annotations

import time

import psutil

from tests.kernels import Kernel


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
        assert not psutil.wait_procs(ranks, timeout=3)[1]
        kernel.check("assert ddpkit.spawn(lambda rank: rank).values == [0, 1]")
