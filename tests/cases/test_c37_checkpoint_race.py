"""Ranks read a checkpoint while rank 0 still writes it: no file, or half of one. And all ranks load onto GPU 0.

karpathy/nanochat#336, pytorch/pytorch#23138
"""

from __future__ import annotations

import time

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def save_then_load(rank, path, wait, half=False):
    """Rank 0 begins to save when rank 1 is there already (and, without the barrier, has begun to load)."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    here, written = path.with_suffix(".here"), path.with_suffix(".written")
    if rank == 0:
        while not (half or here.exists()):
            time.sleep(0.001)
        torch.save({"w": torch.arange(1_000_000)}, path)
        if half:
            path.write_bytes(path.read_bytes()[:4_000_000])
            written.touch()
            time.sleep(300)
    was_there = path.exists()
    while half and not written.exists():
        time.sleep(0.001)
    try:
        if wait:
            here.touch()
            dist.barrier()
        return was_there, int(torch.load(path, map_location="cpu")["w"][-1])
    finally:
        here.touch()


def test_with_a_barrier_all_load_the_whole(tmp_path):
    run = ddpkit.spawn(save_then_load, (tmp_path / "late.pt", True), view=False)
    assert run.values == [(True, 999_999), (False, 999_999)]


def test_a_file_that_is_not_there_yet_is_explained(tmp_path):
    path = tmp_path / "late.pt"
    error = fails(ddpkit.RankFailed, save_then_load, (path, False))
    says(error, "rank 1 of 2 failed: FileNotFoundError: ", str(path), "in save_then_load\n", "another rank may still be writing it", "dist.barrier()")
    assert error.rank == 1


def test_half_a_file_is_explained(tmp_path):
    error = fails(ddpkit.RankFailed, save_then_load, (tmp_path / "late.pt", False, True))
    says(error, "rank 1 of 2 failed: ", "in save_then_load\n", "not whole: another rank may still be writing it", "dist.barrier()")
    assert error.rank == 1


def test_each_rank_loads_onto_its_own_gpu(tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def load(rank, path):
        import torch

        torch.cuda.set_device(rank)
        saved = torch.load(path, map_location=f"cuda:{rank}")
        return saved["w"].device.index, torch.cuda.memory_allocated(1 - rank)

    torch.save({"w": torch.ones(8, device="cuda:0")}, tmp_path / "gpu.pt")
    assert ddpkit.spawn(load, (tmp_path / "gpu.pt",), view=False).values == [(0, 0), (1, 0)]
