"""One rank fails, the others sit in a collective for half an hour or fail with a connection error, and that is what the learner reads.

determined-ai/determined#8915, pytorch/pytorch#46874
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says


@pytest.mark.usefixtures("nothing_left")
def test_the_error_begins_with_the_rank_that_failed(start_method):
    def step(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print(f"rank {rank} starts")
        if rank == 1:
            raise ValueError("bad sample 13")  # the line a learner must be sent to
        dist.all_reduce(torch.ones(1))

    error = fails(ddpkit.RankFailed, step, start_method=start_method, timeout=600)
    says(error, "rank 1 of 2 failed: ValueError: bad sample 13\n", "test_c02", "in step\n", "# the line a learner must be sent to")
    assert error.rank == 1 and isinstance(error.cause, ValueError)
    assert all(failure.follows for failure in error.failures[1:])
    assert error.output[1] == "rank 1 starts\n"
    assert "closed" not in str(error) and "reset" not in str(error)


@pytest.mark.usefixtures("nothing_left")
def test_connection_errors_of_the_others_come_after_it():
    def step(rank):
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 2:
            print("no value", flush=True)
            os._exit(3)
        dist.all_reduce(torch.ones(1))  # what the others wait in

    error = fails(ddpkit.RankDied, step, nprocs=3, timeout=600)
    says(error, "rank 2 of 3 died: ", "exit status 3", "Follow-on, only because a peer was gone: ", "Its last words: no value")
    assert error.rank == 2 and all(failure.follows for failure in error.failures[1:])
    assert len(error.failures) > 1


@pytest.mark.usefixtures("nothing_left")
def test_a_model_that_one_rank_cannot_build_is_not_told_as_unlike_models():
    def build(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if rank == 0:
            raise KeyError("hidden_size")
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    error = fails(ddpkit.RankFailed, build, timeout=600)
    says(error, "rank 0 of 2 failed: KeyError: 'hidden_size'\n", 'raise KeyError("hidden_size")')
    assert "unlike" not in str(error) and "rank 1 of" not in str(error)


def test_in_a_notebook_the_error_shows_the_cells_line(kernel):
    number = kernel.check("""import ddpkit
import torch
import torch.distributed as dist

def step(rank):
    dist.init_process_group("gloo")
    print(f"rank {rank} starts")
    if rank == 1:
        raise ValueError("bad sample 13")
    dist.all_reduce(torch.ones(1))
""").number
    cell = kernel.run("ddpkit.spawn(step)")
    assert cell.error == "RankFailed"
    says(cell.traceback, "RankFailed: rank 1 of 2 failed: ValueError: bad sample 13\n", f"  Cell In[{number}], line 9, in step\n", "raise ValueError")
    assert "supervise" not in cell.traceback and "spawn.py" not in cell.traceback
    assert "rank 1 │ rank 1 starts" in cell.shown
