"""Shuffling is on, yet every epoch has the same order, because nobody called set_epoch.

pytorch/pytorch#31771, kan-bayashi/ParallelWaveGAN#177
"""

from __future__ import annotations

import pytest

import ddpkit

pytestmark = pytest.mark.usefixtures("nothing_left")


def orders(rank, call_it):
    from torch.utils.data import DistributedSampler

    part = DistributedSampler(range(16), 2, rank, shuffle=True)
    seen = []
    for epoch in range(2):
        if call_it:
            part.set_epoch(epoch)
        seen.append(list(part))
    return seen


def test_the_mistake_is_to_be_seen():
    for first, second in ddpkit.spawn(orders, (False,), view=False):
        assert first == second


def test_with_set_epoch_orders_differ_and_parts_make_the_whole():
    run = ddpkit.spawn(orders, (True,), view=False)
    for first, second in run:
        assert first != second
    for epoch in range(2):
        assert sorted(run[0][epoch] + run[1][epoch]) == list(range(16))
