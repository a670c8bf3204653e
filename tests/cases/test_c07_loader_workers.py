"""DataLoader workers inside a rank: a daemonic rank may not start any, or they cannot find the Dataset that was typed into a cell.

pytorch/pytorch#14390, pytorch/pytorch#51344
"""

from __future__ import annotations

import pytest

from tests.cases import says

CELL = """
import ddpkit, os, psutil
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Squares(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return i

class Broken(Squares):
    def __getitem__(self, i):
        if i == 7:
            raise LookupError("picture 7 is broken")
        return i

class Pids(Squares):
    def __getitem__(self, i):
        return os.getpid()

def keep(batch):                  # a collate_fn of a cell
    return list(batch)

def total(rank, data, context):
    part = DistributedSampler(data, 2, rank, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=part, num_workers=2, collate_fn=keep, multiprocessing_context=context)
    return sum(sum(batch) for batch in loader)

def left_open(rank, data):
    batches = iter(DataLoader(data, num_workers=2, persistent_workers=True, collate_fn=keep))
    pids = {next(batches)[0], next(batches)[0]}
    globals()["not_closed"] = batches            # lives as long as the rank
    return pids
"""


@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_workers_find_what_cells_defined(kernel, context):
    kernel.check(CELL)
    cell = kernel.check(f"ddpkit.spawn(total, (Squares(), {context!r})).values")
    assert cell.result is not None and cell.result["text/plain"] == "[20, 25]"
    assert cell.displays == []  # no warning of forks and threads


@pytest.mark.long
@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_workers_of_spawned_ranks_find_it_too(kernel, context):
    kernel.check(CELL)
    kernel.check(f"assert ddpkit.spawn(total, (Squares(), {context!r}), start_method='spawn').values == [20, 25]")


def test_no_worker_outlives_its_rank(kernel):
    kernel.check(CELL)
    kernel.check("""
run = ddpkit.spawn(left_open, (Pids(),))
pids = [pid for pids in run.values for pid in pids]
assert len(set(pids)) == 4
assert not any(psutil.pid_exists(pid) for pid in pids)
""")


def test_an_error_in_a_worker_names_rank_and_line(kernel):
    kernel.check(CELL)
    cell = kernel.run("ddpkit.spawn(total, (Broken(), None))")
    assert cell.error == "RankFailed"
    says(cell.evalue, "rank 1 of 2 failed: LookupError: Caught LookupError in DataLoader worker process", "picture 7 is broken", "in total\n")
