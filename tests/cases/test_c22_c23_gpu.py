"""A launcher that forks fails once a cell has used the GPU; nccl with two ranks on one GPU, or without any, ends in a long text of its own.

huggingface/accelerate#1293, NVIDIA/nccl#1241
"""

from __future__ import annotations

import pytest
import torch

import ddpkit
from tests.cases import fails, says

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")


@needs_gpu
def test_the_notebook_has_used_the_gpu_before(kernel, start_method):
    kernel.check("import ddpkit, torch\nx = torch.ones(2, device='cuda')\nprint(torch.cuda.get_device_name(0))")
    kernel.check("def work(rank):\n    return torch.full((1,), rank, device='cuda').item()")
    kernel.check(f"assert ddpkit.spawn(work, start_method={start_method!r}).values == [0, 1]")


def sum_on(rank, backend, device):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.usefixtures("nothing_left")
def test_nccl_with_fewer_gpus_than_ranks_is_told_before_nccl_speaks():
    nprocs = GPUS + 2 if GPUS != 1 else 2
    error = fails(ddpkit.RankFailed, sum_on, ("nccl", "cuda:0"), nprocs=nprocs, within=30)
    gpus = f"{GPUS or 'no'} GPU{'s' * (GPUS != 1)}"
    says(error, 'ValueError: backend "nccl" wants one GPU for each rank', f"{nprocs} ranks and {gpus}", 'Use backend "gloo"', "in sum_on\n")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def test_gloo_serves_two_ranks_on_one_device(device):
    assert ddpkit.spawn(sum_on, ("gloo", device), view=False).values == [2.0, 2.0]
