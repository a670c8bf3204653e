"""Step time and epoch time of the MNIST lesson, in two ways by turns.

From a cell of a real notebook kernel that shows the output live, beside torchrun; or in such a cell with the record of collectives, beside
without.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpkit.data import mnist_root
from tests.bench import lesson, machine
from tests.bench.launchers import TRIES
from tests.kernels import Kernel

SECONDS = 300
"""Of one training, more than enough."""


KIT, TORCHRUN, NO_RECORD = "ddpkit.spawn", "torchrun", "ddpkit.spawn without record"


def measure(ranks: list[int], rounds: int, other: str) -> list[dict[str, Any]]:
    """Measure and print, ddpkit.spawn and the other by turns; returns one row for each number of ranks."""
    root, rows = mnist_root(), []
    os.environ.update(machine.ENVIRONMENT)
    for nprocs in ranks:
        print(
            f"\n{nprocs} ranks, {lesson.EPOCHS} epochs, {rounds} rounds by turns (medians: ms a step / s an epoch / s of processor time an epoch)",
            flush=True,
        )
        with Kernel() as kernel:
            kernel.check("import ddpkit\nfrom tests.bench.lesson import train")
            ways: dict[str, Callable[[str], None]] = {
                KIT: lambda out: _in_a_cell(kernel, nprocs, root, out),
                other: lambda out: _torchrun(nprocs, root, out) if other == TORCHRUN else _in_a_cell(kernel, nprocs, root, out, DDPKIT_RECORD="0"),
            }
            seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
            for number in range(rounds):
                # Each begins every other round: a machine that slows down or speeds up favours neither.
                for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                    with tempfile.TemporaryDirectory() as out:
                        ways[name](out)
                        seen[name].append(_figures(out, nprocs))
                last = [seen[name][-1] for name in ways]
                if last[0]["losses"] != last[1]["losses"]:
                    raise RuntimeError("the two did not train the same: their losses differ")
                if last[0]["threads"] != last[1]["threads"]:
                    raise RuntimeError(f"the two did not have the same number of threads: {last[0]['threads']} and {last[1]['threads']}")
                print(f"round {number + 1}   " + "   ".join(f"{name} {_of(seen[name][-1:])}" for name in ways), flush=True)
        row: dict[str, Any] = {"ranks": nprocs, "rounds": rounds}
        for name in ways:
            row[name] = {what: statistics.median(v for figures in seen[name] for v in figures[what]) for what in ("steps", "epochs", "cpu")}
            print(f"all       {name} {_of(seen[name])}")
        for what in ("steps", "epochs", "cpu"):
            row[f"throughput_by_{what}"] = row[other][what] / row[KIT][what]
        print(
            f"{KIT} has {row['throughput_by_steps']:.3f} of the throughput of {other} by the median step, "
            f"{row['throughput_by_epochs']:.3f} by the median epoch, {row['throughput_by_cpu']:.3f} by the ranks' processor time "
            "(1 is equal, more is faster)",
            flush=True,
        )
        rows.append(row)
    return rows


def cost_of_record() -> None:
    """Print what the record adds to one collective, in a rank that is alone: there a collective is hardly more than the call."""
    import ddpkit

    def seconds(rank: int) -> float:
        import time

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x, best = torch.ones(10), float("inf")
        for _ in range(30):
            began = time.perf_counter()
            for _ in range(500):
                dist.all_reduce(x)
            best = min(best, (time.perf_counter() - began) / 500)
        return best

    with_record, without = (min(ddpkit.spawn(seconds, nprocs=1, env={"DDPKIT_RECORD": on}, view=False)[0] for _ in range(3)) for on in ("1", "0"))
    print(f"\nan all_reduce of one rank takes {1e6 * with_record:.1f} µs with the record and {1e6 * without:.1f} µs without", flush=True)


def _in_a_cell(kernel: Kernel, nprocs: int, root: str, out: str, **env: str) -> None:
    # allow_stdin is how a kernel knows that a person watches: the output is then drawn while the ranks train.
    cell = kernel.check(f"ddpkit.spawn(train, ({root!r}, {out!r}), {nprocs}, env={env}).seconds", allow_stdin=True, timeout=SECONDS)
    if not cell.updates:
        raise RuntimeError("the output was not shown live")


def _torchrun(nprocs: int, root: str, out: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}"]
    for again in reversed(range(TRIES)):
        try:
            machine.run([*command, lesson.__file__, root, out], SECONDS)
            break
        except RuntimeError:
            if not again:
                raise


def _figures(out: str, nprocs: int) -> dict[str, Any]:
    """Seconds of each step and of each epoch of all ranks, and of processor time; the first epoch's first step, which loads code, is in neither."""
    ranks = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(nprocs)]
    epochs = [moments[1:] for rank in ranks for moments in rank["epochs"]]
    return {
        "steps": [after - before for moments in epochs for before, after in pairwise(moments)],
        "epochs": [moments[-1] - moments[0] for moments in epochs],
        "cpu": [used for rank in ranks for used in rank["cpu"]],  # hardly changed by what else the machine does
        "losses": [rank["losses"] for rank in ranks],
        "threads": ranks[0]["threads"],
    }


def _of(figures: list[dict[str, Any]]) -> str:
    step, epoch, cpu = (statistics.median(v for one in figures for v in one[what]) for what in ("steps", "epochs", "cpu"))
    return f"{1000 * step:6.2f} ms / {epoch:5.2f} s / {cpu:5.2f} s"
