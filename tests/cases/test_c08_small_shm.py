"""A container has 64 MB of shared memory, and batches of DataLoader workers travel through it: a bus error, or everything stands still.

pytorch/pytorch#5040, pytorch/pytorch#1355
"""

from __future__ import annotations

import pytest

from tests.cases import containers, says

READ = """
import sys, time
import ddpkit

def read(rank, workers):
    import torch
    from torch.utils.data import DataLoader
    rows = [torch.zeros(5_000_000) for _ in range(8)]                      # 20 MB each, a batch of 4 has 80 MB
    return sum(batch.shape[0] for batch in DataLoader(rows, batch_size=4, num_workers=workers))

began = time.monotonic()
try:
    print(ddpkit.spawn(read, (int(sys.argv[1]),), start_method=sys.argv[2], view=False).values)
except ddpkit.RankError as error:
    print(type(error).__name__, error)
print("seconds:", time.monotonic() - began)
"""
SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_batches_that_are_too_large_are_explained(method, tmp_path):
    done = containers.run(tmp_path, READ, "2", method, first=SMALL)
    assert done.stderr == ""
    says(
        done.stdout,
        "RankFailed rank",
        " of 2 failed: RuntimeError: ",
        "in read\n",
        "(/dev/shm)",
        "num_workers=0",
        "smaller batches",
        "/dev/shm has 64 MB here.",
    )
    assert float(done.stdout.rpartition("seconds:")[2]) < 60


def test_without_workers_they_need_no_shared_memory(tmp_path):
    done = containers.run(tmp_path, READ, "0", "forkserver", first=SMALL)
    assert done.stderr == "" and done.stdout.startswith("[8, 8]\n")
