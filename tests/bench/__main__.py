"""`python -m tests.bench launch`, `… train`, `… record` and `… ranks`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.bench import launch, machine, ranks, train


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="ddpkit beside torch.multiprocessing.spawn and torchrun.")
    tools = parser.add_subparsers(dest="tool", required=True)
    tool = tools.add_parser("launch", help="seconds to the first all-reduce and the first DDP step, and memory")
    tool.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (default: 2 4)")
    tool.add_argument("--repeat", type=int, default=4, metavar="N", help="calls of each launcher, at least 2 (default: 4)")
    tool.add_argument("--launchers", nargs="+", choices=launch.LAUNCHERS, default=list(launch.LAUNCHERS), help="(default: all)")
    tool = tools.add_parser("train", help="step time and epoch time of the MNIST lesson, in a notebook and under torchrun")
    tool.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="numbers of ranks (default: 2)")
    tool.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each (default: 5)")
    tool = tools.add_parser("record", help="the same in a notebook, with the record of collectives and without: what the record costs")
    tool.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="numbers of ranks (default: 2)")
    tool.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each (default: 5)")
    tool = tools.add_parser("ranks", help="ranks that stay: start, round trip of a cell, memory; beside ipyparallel where it is installed")
    tool.add_argument("--ranks", type=int, nargs="+", default=[4], metavar="N", help="numbers of ranks (default: 4)")
    for tool in tools.choices.values():
        tool.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    if options.tool == "launch" and options.repeat < 2:
        parser.error("--repeat must be 2 or more: the first call and later calls are told apart")
    if not sys.platform.startswith("linux"):
        parser.error("memory is read from /proc, which only Linux has")

    about = machine.about()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    machine.fill_page_cache()
    if options.tool == "ranks":
        figures = ranks.measure(options.ranks)
    elif options.tool == "launch":
        figures = launch.measure(options.ranks, options.repeat, options.launchers)
    else:
        if options.tool == "record":
            train.cost_of_record()
        figures = train.measure(options.ranks, options.rounds, train.TORCHRUN if options.tool == "train" else train.NO_RECORD)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, options.tool: figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
