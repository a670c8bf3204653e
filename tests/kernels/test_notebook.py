"""`spawn` from cells of real kernels: what learners do, and what their notebooks then hold."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.kernels import Kernel
from tests.leftovers import still_alive

METHODS = ["forkserver", "spawn"]


def below(pid: int) -> set[int]:
    return {p.pid for p in psutil.Process(pid).children(recursive=True)}


def wait_gone(pids: set[int], seconds: float) -> list[psutil.Process]:
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            pass
    return still_alive(processes, seconds)


def test_anything_from_a_cell_runs(kernel):
    kernel.check("""
import ddpkit
def tens(rank):
    return rank * 10
def adder(step):
    def inner(rank):
        return rank + step
    return inner
class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, rank, fn):
        return fn(rank) * self.by
""")
    for method in METHODS:
        kernel.check(f"""
assert ddpkit.spawn(tens, start_method={method!r}).values == [0, 10]
assert ddpkit.spawn(adder(100), start_method={method!r}).values == [100, 101]
assert ddpkit.spawn(lambda rank: rank - 2, start_method={method!r}).values == [-2, -1]
assert ddpkit.spawn(Scale(3), (lambda r: r + 1,), start_method={method!r}).values == [3, 6]
assert ddpkit.spawn(Scale(2).__call__, (tens,), start_method={method!r}).values == [0, 20]
""")


def test_globals_of_other_cells_have_their_present_values(kernel):
    kernel.check("import math, ddpkit\nSCALE, history = 3, []")
    kernel.check("""
def work(rank):
    history.append(rank)
    return math.floor(rank * SCALE + 0.5), list(history)
assert ddpkit.spawn(work).values == [(0, [0]), (3, [1])]
assert history == []
""")
    kernel.check("SCALE = 5\nassert ddpkit.spawn(work).values == [(0, [0]), (5, [1])]")
    kernel.check("def work(rank):\n    return rank + SCALE\nassert ddpkit.spawn(work).values == [5, 6]")


@pytest.mark.parametrize("method", METHODS)
def test_classes_keep_their_identity_and_nothing_flows_back(kernel, method):
    kernel.check("""
import ddpkit
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    count = 0
    def double(self):
        return Point(self.x * 2)
def make(rank, given):
    Point.count = 99                 # in the rank's copy of the class
    Point.double = None
    assert isinstance(given, Point)
    return given, Point(rank), Point
double = Point.double
""")
    kernel.check(f"""
run = ddpkit.spawn(make, (Point(7),), start_method={method!r})
for rank, (given, made, kind) in enumerate(run):
    assert type(given) is type(made) is kind is Point
    assert given == Point(7) and made == Point(rank)
assert Point.count == 0 and Point.double is double and made.double() == Point(2)
""")


@pytest.mark.parametrize("method", METHODS)
def test_main_in_a_rank_holds_what_cells_defined(kernel, method, tmp_path):
    kernel.check("""
import ddpkit, torch
class Config:
    width = 4
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
def save(rank, model, path):
    import pickle, __main__
    counter_before = globals().get("counter")
    exec("counter = 5", globals())
    pickle.loads(pickle.dumps(Config()))          # by name, through __main__
    if rank == 0:
        torch.save({"model": model, "config": Config()}, path)
    return __main__.__dict__ is globals(), __main__.counter, counter_before
""")
    kernel.check(f"""
assert ddpkit.spawn(save, (Model(), {str(tmp_path / "m.pt")!r}), start_method={method!r}).values == [(True, 5, None)] * 2
loaded = torch.load({str(tmp_path / "m.pt")!r}, weights_only=False)
assert type(loaded["model"]) is Model and type(loaded["config"]) is Config
""")


@pytest.mark.parametrize("method", METHODS)
def test_a_failure_shows_the_cells_lines_and_no_frames_of_the_kit(kernel, method):
    kernel.check("import ddpkit")
    number = kernel.check(
        "def inner(batch):\n    return batch['missing']\n\ndef train(rank):\n    if rank == 1:\n        inner({})\n    return rank"
    ).number
    cell = kernel.run(f"ddpkit.spawn(train, start_method={method!r})")
    assert cell.error == "RankFailed"
    assert cell.evalue == "\n".join(
        [
            "rank 1 of 2 failed: KeyError: 'missing'",
            "  Cell, line 6, in train",
            "      inner({})",
            "  Cell, line 2, in inner",
            "      return batch['missing']",
        ]
    )
    assert cell.traceback == "RankFailed: " + cell.evalue.replace("Cell,", f"Cell In[{number}],")
    kernel.check("assert ddpkit.spawn(lambda rank: rank).values == [0, 1]")


def test_output_is_one_still_block_with_ranks_in_order(kernel):
    kernel.check("import ddpkit, time")
    code = """
def talk(rank):
    time.sleep(0.3 * (1 - rank))     # rank 1 speaks first
    print(f"hello from {rank}")
    time.sleep(0.3)
    print("bye")
print("before")
run = ddpkit.spawn(talk)
print("after")
"""
    text = "rank 0 │ hello from 0\nrank 0 │ bye\nrank 1 │ hello from 1\nrank 1 │ bye"
    program = kernel.check(code)  # as nbval runs it
    assert program.stream == "before\nafter\n"
    assert [d["text/plain"] for d in program.displays] == [text] and program.updates == []
    person = kernel.check(code, allow_stdin=True)  # as JupyterLab runs it
    assert len(person.displays) == 1 and person.updates
    # What JupyterLab saves is the last state: the very output that a program gets.
    assert person.updates[-1] == program.displays[0]
    assert "rank 0" in program.displays[0]["text/html"]
    # Shown while it ran: rank 1's line came first.
    assert person.displays[0]["text/plain"] == "rank 1 │ hello from 1"


def test_a_run_shows_itself(kernel):
    cell = kernel.check("import ddpkit\nddpkit.spawn(lambda rank: rank * 2)")
    assert cell.result is not None and cell.result["text/plain"] == "<lambda> ran on 2 ranks and returned\nrank 0 → 0\nrank 1 → 2"
    assert cell.displays == [] and cell.stream == ""


def test_a_hundred_thousand_lines_are_cut_with_a_note(kernel):
    cell = kernel.check("""
import ddpkit
def talk(rank):
    for i in range(20_000):
        print(f"<{rank}:{i}:" + "x" * 250 + ">")
    return 20_000
run = ddpkit.spawn(talk)
assert run.values == [20_000] * 2 and all(len(text.splitlines()) == 20_000 for text in run.output)
""")
    (shown,) = cell.displays
    assert "… 19,000 more lines: all of them are in output[1] …" in shown["text/plain"]
    assert len(shown["text/html"]) < 1_000_000


def test_async_cells(kernel):
    kernel.check("""
import asyncio, ddpkit
async def later():
    await asyncio.sleep(0)
    return ddpkit.spawn(lambda rank: rank).values
assert await later() == [0, 1]
""")


@pytest.mark.parametrize("presses", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_interrupting_ends_all_ranks_and_what_they_started(kernel, method, presses):
    kernel.check("import ddpkit, os, time\nddpkit.spawn(abs, nprocs=1)")
    before = below(kernel.pid)
    kernel.check("""
def long(rank):
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"], start_new_session=True)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass
""")
    running = kernel.start(f"ddpkit.spawn(long, start_method={method!r})", allow_stdin=True)
    kernel.finish(running, until="rank 1 │ child")
    started = below(kernel.pid) - before
    assert len(started) >= 5  # an agent, two ranks, two children
    for _ in range(presses):
        kernel.manager.interrupt_kernel()
    cell = kernel.finish(running, timeout=30)
    assert cell.error == "KeyboardInterrupt"
    assert cell.seconds < 3
    assert wait_gone(started, 3) == []
    kernel.check(f"assert ddpkit.spawn(lambda rank: rank, start_method={method!r}).values == [0, 1]")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_nothing_outlives_the_kernel(method, how):
    with Kernel() as kernel:
        kernel.check("import ddpkit, time")
        running = kernel.start(f"""
def long(rank):
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"], start_new_session=True)
    time.sleep(600)
ddpkit.spawn(long, start_method={method!r})
""", allow_stdin=True)  # fmt: skip
        first = kernel.finish(running, until="rank 0 │ child")
        if "rank 1 │ child" not in str(first):
            kernel.finish(running, until="rank 1 │ child")
        started = below(kernel.pid)
        if how == "killed":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.manager.shutdown_kernel(now=False)
        assert wait_gone(started, 10) == []
