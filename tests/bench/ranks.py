"""Ranks that stay: seconds to start them, round trip of a trivial cell, and memory; beside ipyparallel's engines where that is installed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import ddpkit
from tests.bench import machine

CELLS = 200
OPEN = 10.0
"""Seconds from the import to the first start: what a learner reads at least before that."""


def measure(ranks: list[int]) -> list[dict[str, Any]]:
    """Measure and print; returns one row for each number of ranks and each tool."""
    rows = []
    time.sleep(OPEN)
    print(f"\n{'':16} {'ranks':>5} {'start s (first / again)':>24} {'cell ms (median / 95 %)':>24} {'idle, torch imported, all MB':>29}")
    for nprocs in ranks:
        rows.append(_row("ddpkit.Ranks", nprocs, _kit))
        if find_spec("ipyparallel"):
            rows.append(_row("ipyparallel", nprocs, _engines))
    print("all MB: summed PSS of the ranks and of all that keeps them, without the calling process.")
    return rows


def _row(name: str, nprocs: int, tool: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    first, again = tool(nprocs), tool(nprocs)
    row = {
        "tool": name,
        "ranks": nprocs,
        "first_start": first["start"],
        "again_start": again["start"],
        "cells": again["cells"],
        "all_mb": again["mb"],
    }
    cells = sorted(1000 * s for s in row["cells"])
    start, cell = (first["start"], again["start"]), (statistics.median(cells), cells[int(0.95 * CELLS)])
    print(f"{name:16} {nprocs:5} {start[0]:13.2f} / {start[1]:8.2f} {cell[0]:13.1f} / {cell[1]:8.1f} {row['all_mb']:29,.0f}", flush=True)
    return row


def _kit(nprocs: int) -> dict[str, Any]:
    began = time.monotonic()
    ranks = ddpkit.Ranks(nprocs)
    ranks.run("1", view=False)
    started = time.monotonic() - began
    with ranks:
        ranks.run("import torch", view=False)
        return {"start": started, "cells": _cells(lambda: ranks.run("1 + 1", view=False)), "mb": machine.below_mb(os.getpid())}


def _engines(nprocs: int) -> dict[str, Any]:
    import ipyparallel

    began = time.monotonic()
    cluster = ipyparallel.Cluster(n=nprocs, log_level=40)
    view = cluster.start_and_connect_sync()[:]
    view.execute("1", block=True)
    started = time.monotonic() - began
    try:
        view.execute("import torch", block=True)
        kept = (
            machine.below_mb(os.getpid())
            - machine.below_mb(ddpkit.supervise.forkserver.pid or 0)
            - machine.pss_mb(ddpkit.supervise.forkserver.pid or 0)
        )
        return {"start": started, "cells": _cells(lambda: view.execute("1 + 1", block=True).get()), "mb": kept}
    finally:
        cluster.stop_cluster_sync()


def _cells(run: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(CELLS):
        began = time.monotonic()
        run()
        seconds.append(time.monotonic() - began)
    return seconds
