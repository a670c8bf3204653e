"""Ranks have unlike numbers of batches: the one with more waits in backward for partners that have finished.

pytorch/pytorch#33148, Lightning-AI/pytorch-lightning#20404
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def train(rank, end):
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(1, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop():
        for done, x in enumerate([torch.ones(2, 1)] * (3 - rank), 1):  # rank 0 has one more
            sgd.zero_grad()
            model(x).mean().backward()
            sgd.step()
        return done

    if end == "join":
        with Join([model]):
            return loop()
    done = loop()
    if end == "barrier":
        dist.barrier()
    return done


def test_who_waits_in_backward_and_who_has_gone_on():
    error = fails(ddpkit.RanksStuck, train, ("barrier",))
    says(error, "rank 0 waits in all_reduce (float32 [2]", "in loop\n", "model(x).mean().backward()", "rank 1 waits in barrier", "dist.barrier()")
    says(error, "loops of unlike length", "DistributedSampler", "drop_last", "join")


def test_who_waits_in_backward_and_who_has_returned():
    error = fails(ddpkit.RanksStuck, train, ("return",))
    says(error, "rank 0 waits for ever", "rank 0 waits in all_reduce (float32 [2]", "model(x).mean().backward()", "rank 1 has returned from train")
    says(error, "loops of unlike length", "DistributedSampler", "drop_last", "join")
    assert [failure.rank for failure in error.failures] == [0]


def test_join_lets_them_finish():
    assert ddpkit.spawn(train, ("join",), view=False).values == [3, 2]
