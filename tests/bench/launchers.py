"""One launcher, several calls, in a process of its own: `python -m tests.bench.launchers NAME NPROCS CALLS` prints JSON.

The process stands for a notebook that has been open for ten seconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import job

OPEN = 10.0
"""Seconds from the import to the first call: what a learner reads at least before the first cell that starts ranks."""
TRIES = 4
"""Python processes that have torch loaded crash at their end now and then ("terminate called without an active exception", torch 2.14). Such a
call is made again, and counted. Ranks of ddpkit do not end by the interpreter's own clean-up."""
SHORT, MOST = 10.0, 20
"""A launcher whose calls are short is called more often, for a better median: until this many seconds, or this many calls."""


def ddpkit(nprocs: int, out: str, memory: bool) -> None:
    from ddpkit import spawn

    spawn(job.numbered, (out, os.getpid(), memory), nprocs)


def mp_spawn(nprocs: int, out: str, memory: bool) -> None:
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(job.numbered_without_environment, (nprocs, port, out, os.getpid(), memory), nprocs)  # type: ignore[attr-defined, no-untyped-call]


def torchrun(nprocs: int, out: str, memory: bool) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}"]
    script = ["--module", "tests.bench.job", out, str(os.getpid()), str(memory)]
    subprocess.run([*command, *script], check=True, stdin=subprocess.DEVNULL)


CALLS: dict[str, Callable[[int, str, bool], None]] = {"ddpkit.spawn": ddpkit, "torch.multiprocessing.spawn": mp_spawn, "torchrun": torchrun}


crashes: list[str] = []
"""How calls ended that had to be made again."""


def one_call(call: Callable[[int, str, bool], None], nprocs: int, memory: bool) -> dict[str, float]:
    """Seconds from the call to the last rank's moments, and to the return of the call."""
    for again in reversed(range(TRIES)):
        with tempfile.TemporaryDirectory() as out:
            began = time.monotonic()
            try:
                call(nprocs, out, memory)
            except Exception as error:  # each launcher has its own kind
                if not again:
                    raise
                crashes.append(type(error).__name__)
                continue
            returned = time.monotonic()
            ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in Path(out).iterdir()]
            break
    if len(ranks) != nprocs:
        raise RuntimeError(f"{len(ranks)} of {nprocs} ranks have done their work")
    seconds = {name: max(rank[name] for rank in ranks) - began for name in ("all_reduce", "step", "end")}
    seconds["return"] = returned - began
    if memory:
        first = next(rank for rank in ranks if rank["rank"] == 0)
        seconds |= {"ranks_mb": sum(rank["rank_mb"] for rank in ranks), "all_mb": first["all_mb"], "launcher_mb": first["launcher_mb"]}
    return seconds


def main() -> None:
    name, nprocs, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if name == "ddpkit.spawn":
        import ddpkit  # noqa: F401 (it loads torch elsewhere meanwhile)
    elif name == "torch.multiprocessing.spawn":
        import torch.multiprocessing  # noqa: F401
    time.sleep(OPEN)
    began = time.monotonic()
    timed: list[dict[str, float]] = []
    while len(timed) < calls or (time.monotonic() - began < SHORT and len(timed) < MOST):
        timed.append(one_call(CALLS[name], nprocs, memory=False))
    # Looking at memory takes time, so a call of its own does it.
    print(json.dumps({"calls": timed, "memory": one_call(CALLS[name], nprocs, memory=True), "crashes": crashes}))


if __name__ == "__main__":
    main()
