"""The work that every launcher's ranks do: join the group, one all-reduce, wrap a model in DDP, one optimizer step, leave.

Each rank writes what it saw into a file, so that no launcher's own way back is part of the work. Times are `time.monotonic()`, which on
Linux is one clock for all processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def job(out: str, launcher: int, memory: bool) -> None:
    """Do the work in this rank, and write the moments to `out`. With `memory`, rank 0 also looks at what `launcher`'s processes take."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    seen = {"rank": dist.get_rank(), "all_reduce": time.monotonic()}
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nn.functional.cross_entropy(model(torch.randn(64, 1, 28, 28)), torch.randint(0, 10, (64,))).backward()
    optimizer.step()
    seen["step"] = time.monotonic()
    if memory:
        from tests.bench import machine

        dist.barrier()  # all ranks are alive and have done their step
        seen["rank_mb"] = machine.pss_mb(os.getpid())
        dist.barrier()
        if dist.get_rank() == 0:
            seen["all_mb"], seen["launcher_mb"] = machine.below_mb(launcher), machine.pss_mb(launcher)
        dist.barrier()
    dist.destroy_process_group()
    seen["end"] = time.monotonic()
    Path(out, f"{seen['rank']}.json").write_text(json.dumps(seen))


def numbered(rank: int, out: str, launcher: int, memory: bool) -> None:
    """For launchers that call `fn(rank, *args)` and have set the environment."""
    job(out, launcher, memory)


def numbered_without_environment(rank: int, nprocs: int, port: int, out: str, launcher: int, memory: bool) -> None:
    """For `torch.multiprocessing.spawn`, where setting the environment is the user's part."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(nprocs))
    job(out, launcher, memory)


if __name__ == "__main__":
    job(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True")
