"""Each rank starts a thread for every core, so that two ranks on two cores are slower than one process.

pytorch/pytorch#22260, Lightning-AI/pytorch-lightning#18677
"""

from __future__ import annotations

import os

import pytest

import ddpkit
from ddpkit import limits

pytestmark = pytest.mark.usefixtures("nothing_left")


def threads(rank):
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_cores_are_shared_out(nprocs):
    got = [number for number, _ in ddpkit.spawn(threads, nprocs=nprocs, view=False)]
    assert min(got) >= 1 and sum(got) <= max(limits.cores(), nprocs)
    assert nprocs > 1 or got == [limits.cores()]  # one rank has them all


def test_spawned_ranks_get_as_many():
    assert ddpkit.spawn(threads, start_method="spawn", view=False).values == ddpkit.spawn(threads, view=False).values


def test_the_learners_own_choice_stays(monkeypatch, start_method):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ddpkit.spawn(threads, start_method=start_method, view=False).values == [(3, "3")] * 2


def test_a_choice_in_env_stays():
    assert ddpkit.spawn(threads, env={"OMP_NUM_THREADS": "3"}, view=False).values == [(3, "3")] * 2
