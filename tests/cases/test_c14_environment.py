"""Environment variables of the wrong kind, range or number: one process waits for ever for a world of two, or the port has six digits.

pytorch/pytorch#49846, NVIDIA/apex#99
"""

from __future__ import annotations

import os

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def world(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_world_size()


def test_a_number_is_not_text():
    with pytest.raises(TypeError, match=r"environment variables are strings.*'WORLD_SIZE': 2, and 2 is a int. Write '2'"):
        ddpkit.spawn(world, env={"WORLD_SIZE": 2})

    def by_hand(rank):
        os.environ["WORLD_SIZE"] = 2

    error = fails(ddpkit.RankFailed, by_hand)
    says(
        error,
        "TypeError: str expected, not int\n",
        'os.environ["WORLD_SIZE"] = 2',
        "environment variables are text",
        'os.environ["WORLD_SIZE"] = "2"',
    )


def test_one_process_of_one_is_a_world():
    assert ddpkit.spawn(world, nprocs=1, env={"RANK": "0", "WORLD_SIZE": "1"}, view=False).values == [1]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MASTER_PORT": "123478"}, ["MASTER_PORT is 123478", "1 to 65535"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK is 2", "WORLD_SIZE 2", "0 to 1"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'", "not a whole number"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE", "not set"]),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_wrong_value_is_named_with_what_is_wanted(variables, words, by_hand):
    def alone(rank):
        if by_hand:
            os.environ.update(variables)
        return world(rank)

    error = fails(ddpkit.RankFailed, alone, nprocs=1, env=None if by_hand else variables)
    says(error, "rank 0 of 1 failed: ValueError: ", *words, "in world\n", "dist.init_process_group")


def test_a_world_of_two_with_one_process_is_told_within_seconds():
    error = fails(ddpkit.RanksStuck, world, nprocs=1, env={"WORLD_SIZE": "2"})
    says(error, "rank 0 waits in init_process_group, for other ranks to come", "in world\n", "WORLD_SIZE is 2, and no process came with RANK 1.")
