"""The second run of a cell says that the group exists already; after an error the old group or the old WORLD_SIZE stays in the kernel.

pytorch/pytorch#43536, Lightning-AI/pytorch-lightning#20232
"""

from __future__ import annotations

import pytest

from tests.cases import says

CELL = """
import os
import ddpkit
import torch.distributed as dist

def twice(rank):
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")            # once too often

def fails(rank):
    dist.init_process_group("gloo")
    raise RuntimeError("stop here")

def seen(rank):
    dist.init_process_group("gloo")
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_world_size()

def again(rank):
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()
before = dict(os.environ)
"""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_group_made_twice_is_explained_and_nothing_stays(kernel, method):
    kernel.check(CELL)
    cell = kernel.run(f"ddpkit.spawn(twice, start_method={method!r})")
    assert cell.error == "RankFailed"
    says(
        cell.evalue, "of 2 failed: ValueError: init_process_group was called twice: this rank has a default process group already", "# once too often"
    )
    cell = kernel.run(f"ddpkit.spawn(fails, start_method={method!r})")
    assert cell.error == "RankFailed" and "stop here" in cell.evalue
    for nprocs in (2, 3):
        kernel.check(f"""
values = ddpkit.spawn(seen, nprocs={nprocs}, start_method={method!r}).values
assert values == [(str(rank), "{nprocs}", {nprocs}) for rank in range({nprocs})]
""")
    kernel.check("assert dict(os.environ) == before and not dist.is_initialized()")


def test_the_cell_of_the_group_can_be_run_again(kernel):
    kernel.check(CELL)
    for _ in range(3):
        kernel.check("assert ddpkit.spawn(again).values == [2, 2]")
