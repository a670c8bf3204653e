"""The second run, or a second notebook on the same server, stops because the rendezvous port is taken.

NVIDIA/tacotron2#181, Lightning-AI/pytorch-lightning#2231
"""

from __future__ import annotations

import os
import socket

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def port():
    """A port at which somebody listens already."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def join(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    return rank


def test_a_taken_port_in_the_notebooks_environment_is_not_used(port, monkeypatch, start_method):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    assert ddpkit.spawn(join, start_method=start_method, view=False).values == [0, 1]
    assert os.environ["MASTER_PORT"] == port


def says_that_it_is_taken(error, port):
    says(
        error,
        "rank 0 of 2 failed: ",
        f"port: {port}",
        "address already in use",
        "init_process_group",
        "another program listens at MASTER_PORT already",
    )
    says(error, "leave MASTER_ADDR and MASTER_PORT to ddpkit.spawn")


def test_a_taken_port_that_the_function_chooses_is_named(port):
    def join(rank):
        import torch.distributed as dist

        os.environ["MASTER_PORT"] = port
        dist.init_process_group("gloo")

    says_that_it_is_taken(fails(ddpkit.RankFailed, join), port)


def test_a_taken_port_in_env_is_named(port):
    says_that_it_is_taken(fails(ddpkit.RankFailed, join, env={"MASTER_PORT": port}), port)


def test_a_free_port_in_env_is_used():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def join(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        return os.environ["MASTER_PORT"]

    assert ddpkit.spawn(join, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, view=False).values == [port] * 2


def test_runs_back_to_back_do_not_take_each_others_port():
    assert [ddpkit.spawn(join, view=False).values for _ in range(3)] == [[0, 1]] * 3
