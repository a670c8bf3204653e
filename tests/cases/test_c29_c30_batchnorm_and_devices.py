"""BatchNorm, two forwards and one backward: an in-place complaint about a tensor that nobody changed. And lines for GPUs, run on a laptop.

pytorch/pytorch#22095, pytorch/pytorch#46821
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def judge(rank, broadcast):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = DDP(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)), broadcast_buffers=broadcast)
    real, fake = torch.randn(4, 2), torch.randn(4, 2)
    (model(real).mean() - model(fake).mean()).backward()
    return "ok"


def test_two_forwards_pass_or_are_explained():
    try:
        assert ddpkit.spawn(judge, (True,), view=False).values == ["ok", "ok"]  # newer torch sends buffers past autograd
    except ddpkit.RankFailed as error:
        says(error, "rank", "modified by an inplace operation", "in judge\n", "broadcast_buffers=False", "one forward")


def test_two_forwards_without_sending_buffers():
    assert ddpkit.spawn(judge, (False,), view=False).values == ["ok", "ok"]


def test_a_tensor_that_really_changed_is_explained():
    """What torch says where it does notice."""

    def change(rank):
        import torch

        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y += 1
        y.sum().backward()  # needs the old y

    error = fails(ddpkit.RankFailed, change)
    says(error, "modified by an inplace operation", "in change\n", "# needs the old y", "broadcast_buffers=False", "one forward")


def test_device_ids_for_a_model_on_the_cpu():
    def wrap(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[rank])

    error = fails(ddpkit.RankFailed, wrap, within=30)
    says(
        error,
        " of 2 failed: ValueError: ",
        "device_ids",
        "cpu",
        "in wrap\n",
        "device_ids was given, and the model is on the CPU",
        "leave device_ids out",
    )


def reduce_on_the_cpu(rank, backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    x = torch.tensor([1.0])
    dist.all_reduce(x)
    return x.item()


def test_gloo_takes_tensors_on_the_cpu():
    assert ddpkit.spawn(reduce_on_the_cpu, ("gloo",), view=False).values == [2.0, 2.0]


def test_nccl_does_not_and_the_device_is_named():
    import torch

    if torch.cuda.device_count() < 1:
        pytest.skip("needs a GPU")
    error = fails(ddpkit.RankFailed, reduce_on_the_cpu, ("nccl",), nprocs=1, within=30)
    says(error, "rank 0 of 1 failed: ", "cpu", "in reduce_on_the_cpu\n", "move the model and every batch to the rank's own device")
