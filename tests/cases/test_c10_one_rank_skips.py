"""Rank 0 evaluates through the DDP wrapper, or leaves the loop alone; the others stand at a barrier, without a message for half an hour.

pytorch/pytorch#54059, ultralytics/yolov5#8345
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def evaluate_on_zero(rank, through_wrapper):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    model.eval()
    if rank == 0:
        with torch.no_grad():
            (model if through_wrapper else model.module)(torch.ones(3, 2))  # only rank 0
    dist.barrier()
    return "ok"


def early_stop(rank, together):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(1, 1))
    for epoch in range(3):
        model(torch.ones(1, 1)).sum().backward()
        stop = torch.tensor(float(rank == 0 and epoch == 0))  # only rank 0 saw its loss get better
        if together:
            dist.broadcast(stop, 0)
        if stop:
            break
    dist.barrier()
    return epoch


def test_evaluation_through_the_wrapper_on_one_rank():
    error = fails(ddpkit.RanksStuck, evaluate_on_zero, (True,))
    says(error, "rank 0 waits in broadcast", "# only rank 0", "rank 1 waits in barrier", "dist.barrier()", "only some ranks reach", "model.module")


def test_evaluation_of_the_module_on_one_rank():
    assert ddpkit.spawn(evaluate_on_zero, (False,), view=False).values == ["ok", "ok"]


def test_one_rank_leaves_the_loop_early():
    error = fails(ddpkit.RanksStuck, early_stop, (False,))
    says(error, "rank 0 waits in barrier", "dist.barrier()", "rank 1 waits in ", "model(torch.ones(1, 1)).sum().backward()")
    says(error, "all ranks must call the same collectives in the same order", "after a `break` (all ranks must decide alike)")


def test_all_ranks_leave_the_loop_together():
    assert ddpkit.spawn(early_stop, (True,), view=False).values == [0, 0]
