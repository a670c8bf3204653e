"""People divide by the world size once more, or expect sums; with unlike parts the mean of means is not the mean.

NVIDIA/apex#696, huggingface/accelerate#1726
"""

from __future__ import annotations

import pytest

import ddpkit

pytestmark = pytest.mark.usefixtures("nothing_left")


def one_step(rank, reduction, rows, accumulate):
    """The weight after one step: y = w x, target 2 x, w = 1, learning rate 0.01."""
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model = DDP(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.tensor(rows[rank]).reshape(-1, 1)
    loss = torch.nn.MSELoss(reduction=reduction)
    pieces = x.split(1) if accumulate else [x]
    for i, piece in enumerate(pieces):
        with nullcontext() if i == len(pieces) - 1 else model.no_sync():
            part = loss(model(piece), 2 * piece)  # the forward inside no_sync as well
            (part / len(pieces) if reduction == "mean" else part).backward()
    sgd.step()
    return round(model.module.weight.item(), 4)


ALL = [[1.0, 2.0, 3.0, 4.0]]
EVEN = [[1.0, 3.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("reduction", "rows", "accumulate", "weight"),
    [
        ("mean", ALL, False, 1.15),
        ("sum", ALL, False, 1.6),
        ("mean", EVEN, False, 1.15),  # as one process
        ("mean", EVEN, True, 1.15),
        ("sum", EVEN, False, 1.3),  # half of 0.60: divided by the world size
        ("mean", [[1.0, 2.0, 3.0], [4.0]], False, 1.2067),  # the mean of unlike parts' means is not the mean
    ],
)
def test_the_weight_after_one_step(reduction, rows, accumulate, weight):
    run = ddpkit.spawn(one_step, (reduction, rows, accumulate), nprocs=len(rows), view=False)
    assert run.values == [weight] * len(rows)
