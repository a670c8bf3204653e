"""Three hundred calls in a row, a third of them faulty: nothing grows."""

from __future__ import annotations

import os
import random
import signal
import sys

import psutil
import pytest

import ddpkit
from ddpkit.supervise import forkserver
from tests import leftovers

CALLS = 300
WARM = 30
"""Calls after which memory counts: until then caches fill (imports, the allocator's arenas)."""
GROWTH = 24 << 20
"""Bytes that a process may grow in all calls that follow. A leak of one run's messages or output (1 MB in the loudest) would show."""


def job():
    """The function that ranks run. Made here, it travels by value: ranks need not import this file."""

    def train(rank, fault, culprit):
        import torch
        import torch.distributed as dist

        print("begins", rank)
        if fault == "before the group" and rank == culprit:
            raise ValueError("before the group")
        dist.init_process_group("gloo")
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        if rank == culprit:
            if fault == "raises":
                raise KeyError("in training")
            if fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "vanishes":
                os._exit(0)
            if fault == "exits":
                sys.exit(3)
            if fault == "aborts":
                os.abort()
            if fault == "result":
                return (i for i in range(3))
            if fault == "loud":
                sys.stdout.write("x" * 1_000_000 + "\n")
                raise ValueError("loud")
            if fault == "grandchild":
                import subprocess

                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                raise ValueError("left a child")
        dist.all_reduce(x)
        return x.item()

    return train


FAULTS = {
    "before the group": ddpkit.RankFailed,
    "raises": ddpkit.RankFailed,
    "is killed": ddpkit.RankDied,
    "vanishes": ddpkit.RankDied,
    "exits": ddpkit.RankDied,
    "aborts": ddpkit.RankDied,
    "result": ddpkit.RankFailed,
    "loud": ddpkit.RankFailed,
    "grandchild": ddpkit.RankFailed,
}


def memory():
    return {"this process": psutil.Process().memory_info().rss, "the forkserver": psutil.Process(forkserver.pid).memory_info().rss}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_three_hundred_calls_leave_nothing():
    draw, train = random.Random(2026), job()
    before, at_first, server = {}, {}, 0
    for call in range(CALLS):
        nprocs = draw.choice([2, 2, 4])
        fault = draw.choice(sorted(FAULTS)) if draw.random() < 1 / 3 else ""
        culprit = draw.randrange(nprocs)
        if fault:
            with pytest.raises(FAULTS[fault]) as caught:
                ddpkit.spawn(train, (fault, culprit), nprocs=nprocs, view=False)
            assert caught.value.rank == culprit, (call, fault, str(caught.value))
            assert caught.value.output[culprit].startswith(f"begins {culprit}\n")
            del caught
        else:
            total = nprocs * (nprocs + 1) / 2
            assert ddpkit.spawn(train, ("", culprit), nprocs=nprocs, view=False).values == [total * nprocs] * nprocs, call
        if call == WARM:
            before = leftovers.settled(leftovers.snapshot() | {"processes": 0})
            at_first, server = memory(), forkserver.pid
        if call > WARM:
            assert leftovers.settled(before) == before, (call, fault)
    assert forkserver.pid == server  # the same one served all calls
    for name, size in memory().items():
        assert size - at_first[name] < GROWTH, f"{name} grew from {at_first[name] >> 20} to {size >> 20} MB"
