"""Time from asking for ranks to their first all-reduce and first DDP step, and what they take of memory, launcher by launcher."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import psutil

from tests.bench import machine

LAUNCHERS = ("ddpkit.spawn", "torch.multiprocessing.spawn", "torchrun")
RANK_MB = {"ddpkit.spawn": 60, "torch.multiprocessing.spawn": 430, "torchrun": 430}
"""Memory of one more rank in MB, roughly: for the choice of what this machine can be asked."""
CALL_SECONDS = 6.0
"""Of one call for each rank, more than enough: after that a launcher hangs."""


def measure(ranks: list[int], repeat: int, launchers: list[str]) -> list[dict[str, Any]]:
    """Measure and print; returns one row for each launcher and number of ranks."""
    rows = []
    for nprocs in ranks:
        print(f"\n{nprocs} ranks, seconds from the call (first call / median of later calls)", flush=True)
        print(f"{'':28} {'1st all-reduce':>16} {'1st DDP step':>16} {'return':>16} {'own part':>9} {'calls':>5} {'ranks MB':>9} {'all MB':>7}")
        of_these = [row for name in launchers if (row := _row(name, nprocs, repeat)) is not None]
        _print_ratios(of_these)
        rows += of_these
    print(
        "\nown part: from the end of the last rank's work to the return of the call (median)."
        "\nranks MB: the ranks' summed PSS while all are alive. all MB: with everything else below the calling process."
        f"\nThe calling process has been open for ten seconds before its first call. {', '.join(f'{k}={v}' for k, v in machine.ENVIRONMENT.items())}."
    )
    return rows


def _row(name: str, nprocs: int, repeat: int) -> dict[str, Any] | None:
    need, have = nprocs * RANK_MB[name], psutil.virtual_memory().available >> 20
    if need > have:
        print(f"{name:28} skipped: {nprocs} ranks need about {need:,} MB, and {have:,} MB are available", flush=True)
        return None
    try:
        limit = 60 + (repeat + 1) * (20 + CALL_SECONDS * nprocs)
        said = machine.run([sys.executable, "-m", "tests.bench.launchers", name, str(nprocs), str(repeat)], limit)
    except RuntimeError as error:
        print(f"{name:28} failed: {error}", flush=True)
        return None
    seen = json.loads(said.splitlines()[-1])
    row: dict[str, Any] = {"launcher": name, "ranks": nprocs, "calls": seen["calls"], **seen["memory"]}
    first, later = seen["calls"][0], seen["calls"][1:]
    for moment in ("all_reduce", "step", "return"):
        row[f"first_{moment}"] = first[moment]
        row[f"again_{moment}"] = statistics.median(call[moment] for call in later)
    row["own"] = statistics.median(call["return"] - call["end"] for call in later)
    pairs = "".join(f" {row[f'first_{m}']:7.2f} / {row[f'again_{m}']:6.3f}" for m in ("all_reduce", "step", "return"))
    print(f"{name:28}{pairs} {row['own']:9.3f} {len(seen['calls']):5} {row['ranks_mb']:9,.0f} {row['all_mb']:7,.0f}", flush=True)
    if seen["crashes"]:
        print(f"{'':28} {len(seen['crashes'])} more calls crashed and were made again: {', '.join(sorted(set(seen['crashes'])))}", flush=True)
    return row


def _print_ratios(rows: list[dict[str, Any]]) -> None:
    kit = next((row for row in rows if row["launcher"] == "ddpkit.spawn"), None)
    for other in rows:
        if kit is not None and other is not kit:
            first, again = (other[f"{call}_step"] / kit[f"{call}_step"] for call in ("first", "again"))
            print(
                f"ddpkit.spawn reaches the first DDP step {again:.1f}x faster than {other['launcher']} ({first:.1f}x in the first call), "
                f"with 1/{other['ranks_mb'] / kit['ranks_mb']:.1f} of the memory for the ranks (1/{other['all_mb'] / kit['all_mb']:.1f} in all)",
                flush=True,
            )
