"""A layer takes no part in the loss: torch tells of an unfinished reduction and of indices, and people switch on a search without knowing why.

pytorch/pytorch#43259, Megvii-BaseDetection/YOLOX#885
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def train(rank, find):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(1, 1)
            self.spare = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.used(x)

    dist.init_process_group("gloo")
    model = DDP(TwoHeads(), find_unused_parameters=find)
    for step in range(2):
        model(torch.ones(1, 1)).sum().backward()
    return step + 1


def test_the_layer_is_named_with_both_cures():
    error = fails(ddpkit.RankFailed, train, (False,))
    says(error, "of 2 failed: RuntimeError: Expected to have finished reduction", "(by name: spare.weight, spare.bias)", "test_c05", "in train\n")
    says(error, "Usually this means: some parameters took no part in the loss", "take the layer out", "find_unused_parameters=True", "costs time")
    assert error.rank in (0, 1) and "used.weight" not in str(error)


def test_the_search_lets_it_train():
    assert ddpkit.spawn(train, (True,), view=False).values == [2, 2]
