"""Groups that are made, left and made again."""

from __future__ import annotations

import pytest

import ddpkit

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_group_that_is_left_while_others_still_join(start_method):
    """gloo connects each rank with each. The kit lets a rank leave when all have joined, also where no collective has made it wait."""

    def train(rank, times):
        import time

        import torch.distributed as dist

        for turn in range(times):
            if rank == turn % 4:
                time.sleep(0.02)  # comes late
            dist.init_process_group("gloo")
            dist.destroy_process_group()
        return "done"

    for _ in range(10 if start_method == "forkserver" else 1):
        assert ddpkit.spawn(train, (4,), nprocs=4, start_method=start_method, view=False).values == ["done"] * 4


def test_leaving_a_group_that_others_never_join():
    """It takes some seconds then, and the rank that failed is to blame."""

    def train(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=1, store=dist.HashStore())
        dist.destroy_process_group()
        if rank == 1:
            raise ValueError("before the group")
        dist.init_process_group("gloo")
        dist.destroy_process_group()

    with pytest.raises(ddpkit.RankFailed) as caught:
        ddpkit.spawn(train, view=False)
    assert caught.value.rank == 1


def test_names_that_a_cell_imported_are_the_same_functions():
    from torch.distributed import destroy_process_group, init_process_group, is_initialized

    def train(rank):
        init_process_group("gloo")
        here = is_initialized()
        destroy_process_group()
        return here, is_initialized()

    assert ddpkit.spawn(train, view=False).values == [(True, False)] * 2


def test_the_backend_where_none_is_asked_for():
    def train(rank):
        import torch.distributed as dist

        dist.init_process_group()
        return dist.get_backend()

    import torch

    enough = torch.cuda.device_count() >= 2
    run = ddpkit.spawn(train, view=False)
    assert run.devices == (["cuda:0", "cuda:1"] if enough else ["cpu", "cpu"])
    assert run.values == [("nccl" if enough else "gloo")] * 2
