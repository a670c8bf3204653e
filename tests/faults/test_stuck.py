"""Ranks that wait for ever are noticed within seconds and explained; ranks that work, sleep or are slow never are."""

from __future__ import annotations

import time

import pytest

import ddpkit
from ddpkit.collectives import PATIENCE, Standstill
from ddpkit.messages import Stand

pytestmark = pytest.mark.usefixtures("nothing_left")


def stuck(fn, nprocs=2, **options):
    """Run it; returns the report and the seconds from the last rank's last step to the report."""
    began = time.monotonic()
    with pytest.raises(ddpkit.RanksStuck) as error:
        ddpkit.spawn(fn, nprocs=nprocs, timeout=60, view=False, **options)
    return error.value, time.monotonic() - began


def test_a_rank_that_calls_one_collective_less(start_method):
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(3)
        dist.all_reduce(x)
        if rank == 0:
            dist.all_reduce(x)

    error, _ = stuck(train, start_method=start_method)
    text = str(error)
    assert text.startswith("rank 0 waits for ever")
    assert "rank 0 waits in all_reduce (float32 [3], number 2 of the default group)" in text
    assert "test_stuck.py, line" in text and "dist.all_reduce(x)" in text
    assert "rank 1 has returned from train, after these collectives: 1 in the default group" in text
    assert "under `if rank == 0`" in text
    assert "agent.py" not in text and "rank.py" not in text  # none of the kit's frames
    assert error.rank == 0 and [f.rank for f in error.failures] == [0]


def test_the_report_comes_within_five_seconds_of_standing_still():
    def train(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()

    ddpkit.spawn(abs, view=False)
    _, seconds = stuck(train)
    assert seconds < 5


def test_a_wait_that_a_timeout_ends_says_where_the_other_ranks_are(start_method):
    """One rank works for longer than the other may wait. That is no standstill, and gloo's own text names no rank and no line."""

    def train(rank):
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        dist.all_reduce(torch.ones(3))
        ddpkit.log(step=rank)
        if rank == 0:
            dist.all_reduce(torch.ones(3))  # waits
        while True:  # works
            pass

    error, seconds = stuck(train, start_method=start_method)
    text = str(error)
    assert text.startswith("rank 0 of 2 waited longer than the timeout, and the others did not come.\n")
    assert "rank 0 waited in all_reduce (float32 [3], number 2 of the default group)" in text and "  # waits" in text
    assert "rank 1 was here\n  " in text and "  # works" in text
    assert "Timed out waiting 2000ms" in text and "give a longer timeout" in text
    assert error.rank == 0 and error.run.metrics == [[{"step": 0}], [{"step": 1}]]
    assert seconds < (10 if start_method == "forkserver" else 40)


def test_a_wait_that_a_timeout_ends_after_the_other_rank_has_returned():
    def train(rank):
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(milliseconds=200))
        if rank == 0:
            dist.all_reduce(torch.ones(3))

    error, _ = stuck(train)
    assert "rank 1 has returned" in str(error)


def test_unlike_collectives_are_named():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(2))

    text = str(stuck(train)[0])
    assert "rank 0 waits in barrier (number 1 of the default group)" in text
    assert "rank 1 waits in all_reduce (float32 [2], number 1 of the default group)" in text
    assert "is barrier in rank 0 and all_reduce in rank 1: all ranks must call the same collectives in the same order" in text


@pytest.mark.parametrize(("sizes", "waits", "gone"), [((3, 2), 0, 1), ((2, 3), 1, 0)])
def test_unlike_tensors_are_named_where_one_rank_goes_on_with_garbage(sizes, waits, gone):
    """gloo lets the rank with the smaller tensor go; both have called the same collectives equally often."""

    def train(rank, sizes):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(sizes[rank]))

    text = str(stuck(train, args=(sizes,))[0])
    assert f"rank {waits} waits in all_reduce (float32 [3], number 1 of the default group)" in text
    assert f"rank {gone} has returned from train, after these collectives: 1 in the default group\n" in text
    assert f"rank {gone} called all_reduce (float32 [2], number 1 of the default group)\n" in text
    assert text.endswith("The same call has unlike tensors: shape and dtype must be equal in all ranks.")


def test_a_loop_that_one_rank_leaves_early():
    def train(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(1, 1))
        for epoch in range(3):
            model(torch.ones(1, 1)).sum().backward()
            if rank == 0 and epoch == 0:
                break
        dist.barrier()

    text = str(stuck(train)[0])
    assert "rank 0 waits in barrier" in text and "dist.barrier()" in text
    assert "rank 1 waits in" in text and "model(torch.ones(1, 1)).sum().backward()" in text


def test_a_group_that_never_forms():
    def train(rank):
        import torch.distributed as dist

        if rank == 0:
            dist.init_process_group("gloo")

    text = str(stuck(train)[0])
    assert "rank 0 waits in init_process_group, for other ranks to come" in text
    assert "rank 1 has returned from train" in text and "WORLD_SIZE" in text


def test_everybody_receives_and_nobody_sends():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.recv(torch.ones(2), 1 - rank)

    text = str(stuck(train)[0])
    assert "rank 0 waits in recv (float32 [2], from rank 1)" in text and "rank 1 waits in recv (float32 [2], from rank 0)" in text


def test_an_async_collective_that_is_waited_for():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            work.wait()

    text = str(stuck(train)[0])
    assert "rank 0 waits in all_reduce (float32 [2], number 1 of the default group)" in text and "work.wait()" in text


def test_a_group_of_some_ranks():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        odd = dist.new_group([1, 2])
        if rank == 1:
            dist.all_reduce(torch.ones(2), group=odd)

    text = str(stuck(train, nprocs=3)[0])
    assert text.startswith("rank 1 waits for ever")
    assert "number 1 of the group of ranks 1, 2" in text


def test_what_ranks_printed_is_kept_and_the_next_call_works():
    def train(rank):
        import torch.distributed as dist

        print("begins", rank)
        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()

    error, _ = stuck(train)
    assert error.output == ("begins 0\n", "begins 1\n")
    assert ddpkit.spawn(lambda rank: rank, view=False).values == [0, 1]


def test_without_a_record_the_function_is_named(start_method):
    def train(rank):
        import torch.distributed as dist

        del dist.ProcessGroup.register_pre_hook  # as in an older torch

        dist.init_process_group("gloo")
        if rank == 0:
            dist.barrier()

    text = str(stuck(train, start_method=start_method)[0])
    assert "rank 0 waits in barrier" in text and "dist.barrier()" in text


# Nobody is stuck here.


def work_while_others_wait(seconds):
    """Rank 0 computes, rank 1 sleeps, rank 2 writes to a disk, rank 3 waits for them."""

    def train(rank, seconds):
        import tempfile

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        end = time.monotonic() + seconds
        if rank == 0:
            x = torch.rand(300, 300)
            while time.monotonic() < end:
                x = (x @ x).clamp(0, 1)
        if rank == 1:
            time.sleep(seconds)
        if rank == 2:
            with tempfile.TemporaryFile() as file:
                while time.monotonic() < end:
                    file.seek(0)
                    file.write(b"x" * (1 << 20))
                    file.flush()
        dist.barrier()
        return "done"

    return ddpkit.spawn(train, (seconds,), nprocs=4, view=False).values


def test_ranks_that_work_are_not_stuck():
    assert work_while_others_wait(2 * PATIENCE + 3) == ["done"] * 4


@pytest.mark.long
def test_ranks_that_work_for_a_minute_are_not_stuck():
    assert work_while_others_wait(60) == ["done"] * 4


def test_ranks_of_very_unlike_speed_are_not_stuck():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(4):
            if rank == 1:
                time.sleep(2.2)  # nearly as long as standing still is allowed, again and again
            dist.all_reduce(torch.ones(1))
        return "done"

    assert ddpkit.spawn(train, view=False).values == ["done", "done"]


def test_a_paused_rank_is_not_stuck():
    """As in a debugger: it does not answer, and the others wait for it."""

    def train(rank, seconds):
        import os
        import signal
        import subprocess
        import sys

        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            code = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return "done"

    assert ddpkit.spawn(train, (2 * PATIENCE + 2,), view=False).values == ["done", "done"]


# The rule itself, without processes.


def stand(rank, moment, *, waits=True, cpu=0.0, number=1):
    collective = {"op": "all_reduce", "number": number, "group": "default group", "root": -1, "dtype": "float32", "shapes": [[1]]}
    return Stand(rank, moment, cpu, waits, collective if waits else None, [["file", 1, "train", ""]], {"default group": number})


def hear(answers, ended=()):
    still = Standstill(2)
    for answer in answers:
        still.hear(answer)
    return [s.rank for s in still.stuck(ended)]


@pytest.mark.parametrize(
    ("answers", "ended", "expected"),
    [
        ([stand(r, t) for t in (0, 1, 2, 3) for r in (0, 1)], (), [0, 1]),
        ([stand(r, t) for t in (0, 1, 2) for r in (0, 1)], (), []),  # not long enough
        ([stand(0, t) for t in (0, 1, 2, 3)], (), []),  # rank 1 has never answered
        ([stand(0, t) for t in (0, 1, 2, 3)], (1,), [0]),
        ([stand(r, t, waits=r == 0) for t in (0, 1, 2, 3) for r in (0, 1)], (), []),  # rank 1 works
        ([stand(r, t, cpu=t * 0.5 * r) for t in (0, 1, 2, 3) for r in (0, 1)], (), []),  # rank 1 uses the processor
        ([stand(r, t, number=t) for t in (0, 1, 2, 3) for r in (0, 1)], (), []),  # each time another collective
        ([], (0, 1), []),
    ],
)
def test_the_rule(answers, ended, expected):
    assert hear(answers, ended) == expected
