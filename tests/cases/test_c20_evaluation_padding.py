"""A sampler pads to parts of equal size, so that samples are counted twice and accuracy depends on the number of ranks.

pytorch/pytorch#25162, Lightning-AI/pytorch-lightning#2398
"""

from __future__ import annotations

import pytest

import ddpkit

pytestmark = pytest.mark.usefixtures("nothing_left")


def score(rank, careful):
    import torch
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    hits = [1, 0, 0, 0, 0]  # only sample 0 is classified right
    world_size = dist.get_world_size()
    mine = range(rank, len(hits), world_size) if careful else list(DistributedSampler(hits, world_size, rank, shuffle=False))
    counts = torch.tensor([sum(hits[i] for i in mine), len(mine)], dtype=torch.float64)
    dist.all_reduce(counts)
    return round((counts[0] / counts[1]).item(), 4), int(counts[1])


def test_the_samplers_padding_is_counted():
    assert ddpkit.spawn(score, (False,), view=False).values == [(0.3333, 6)] * 2


@pytest.mark.parametrize("nprocs", [1, 2, 3, 6])
def test_an_exact_split_gives_the_same_for_any_number_of_ranks(nprocs):
    assert ddpkit.spawn(score, (True,), nprocs=nprocs, view=False).values == [(0.2, 5)] * nprocs
