"""The way of platforms that cannot fork (Windows): the agent is a program of its own, and ranks are spawned."""

from __future__ import annotations

import os

import pytest

import ddpkit
from ddpkit import supervise


@pytest.fixture(autouse=True)
def cannot_fork(nothing_left, monkeypatch):
    monkeypatch.setattr(supervise, "CAN_FORK", False)
    monkeypatch.setattr(supervise.forkserver, "agent", None)  # nobody may ask for it


def test_values_output_metrics_and_a_collective():
    def train(rank, big):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        print("héllo from", rank)
        ddpkit.log(rank=rank)
        return float(x), len(big), os.getppid()

    run = ddpkit.spawn(train, (b"x" * (3 << 20),), view=False)
    assert [value[:2] for value in run.values] == [(3.0, 3 << 20)] * 2
    assert len({value[2] for value in run.values} - {os.getpid()}) == 1  # the agent is between us and them
    assert run.output == ["héllo from 0\n", "héllo from 1\n"] and run.metrics == [[{"rank": 0}], [{"rank": 1}]]


def test_a_failure_and_a_death():
    def train(rank, how):
        print("begins")
        if rank == 1 and how == "raise":
            raise ValueError("no luck")  # the fault
        if rank == 1:
            os._exit(3)

    with pytest.raises(ddpkit.RankFailed) as failed:
        ddpkit.spawn(train, ("raise",), view=False)
    assert str(failed.value).startswith("rank 1 of 2 failed: ValueError: no luck") and "  # the fault" in str(failed.value)
    assert failed.value.output[1] == "begins\n"
    with pytest.raises(ddpkit.RankDied, match="exit status 3"):
        ddpkit.spawn(train, ("exit",), view=False)


def test_ranks_that_wait_for_ever():
    def train(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()

    with pytest.raises(ddpkit.RanksStuck, match="rank 0 waits for ever"):
        ddpkit.spawn(train, view=False)


def test_an_interrupt():
    import signal
    import threading
    import time

    def train(rank):
        print("begins")
        time.sleep(600)

    timer = threading.Timer(6, lambda: os.kill(os.getpid(), signal.SIGINT))  # whatever the ranks do then
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ddpkit.spawn(train, view=False)
    timer.join()


def test_the_forkserver_is_refused():
    with pytest.raises(ValueError, match="needs a platform that can fork"):
        ddpkit.spawn(abs, start_method="forkserver")


def test_an_agent_that_cannot_start(monkeypatch):
    monkeypatch.setattr(supervise, "_RUN_AGENT", "raise SystemExit('no agent today')")
    with pytest.raises(ddpkit.LaunchFailed, match="could not be started: no agent today"):
        ddpkit.spawn(abs, view=False)
