"""A loop is running already in a notebook; display, magics and input exist only there; a figure drawn in a child never shows, or hangs.

jupyter/notebook#4312, ipython/ipython#12771
"""

from __future__ import annotations

import pytest

from tests.cases import says

CELL = """
import asyncio
import ddpkit

def hello(rank):
    return rank

async def from_async():
    await asyncio.sleep(0)
    return ddpkit.spawn(hello).values

def shows(rank):
    display({"rank": rank})

def magic(rank):
    %time 1

def asks(rank):
    return input("how many epochs? ")

async def waits(rank):
    await asyncio.sleep(0)

def runs_a_loop(rank):
    async def later():
        await asyncio.sleep(0)
        return rank
    return asyncio.run(later())

def plots(rank):
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots()
    axes.plot([rank, rank + 1])
    plt.show()
    return plt.get_backend().lower(), figure
"""


def test_an_async_cell_can_launch(kernel):
    kernel.check(CELL)
    kernel.check("assert await from_async() == [0, 1]")
    kernel.check("assert await asyncio.gather(from_async(), from_async()) == [[0, 1]] * 2")


def test_a_rank_can_run_a_loop_of_its_own(kernel):
    kernel.check(CELL)
    kernel.check("assert ddpkit.spawn(runs_a_loop).values == [0, 1]")
    cell = kernel.run("ddpkit.spawn(waits)")
    assert cell.error == "TypeError" and "asyncio.run" in str(cell.evalue)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("shows", ["NameError: name 'display' is not defined", "in shows\n", "in the notebook only", "print in the rank, or return"]),
        ("asks", ["EOFError: ", "in asks\n", "input() was called in a rank, and nobody can answer there", "pass the answer in args"]),
    ],
)
@pytest.mark.parametrize("somebody_is_there", [False, True])
def test_what_exists_in_the_notebook_only_is_explained(kernel, function, words, somebody_is_there):
    kernel.check(CELL)
    cell = kernel.run(f"ddpkit.spawn({function})", allow_stdin=somebody_is_there, timeout=30)
    assert cell.error == "RankFailed"
    says(cell.evalue, "ranks 0 and 1 of 2 failed: ", *words, "All ranks failed in the same way.")


def test_a_line_with_a_magic_is_named_before_anything_starts(kernel):
    kernel.check(CELL)
    cell = kernel.run("ddpkit.spawn(magic)", timeout=30)
    assert cell.error == "NotPicklable"
    says(cell.evalue, "magic uses get_ipython, as every line that begins with % or ! does", "in the notebook only", "leave such lines out")


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_figure_is_drawn_without_a_window_and_can_be_returned(kernel, method):
    pytest.importorskip("matplotlib")
    kernel.check(CELL)
    cell = kernel.check(f"""
run = ddpkit.spawn(plots, start_method={method!r})
assert [backend for backend, _ in run] == ["agg", "agg"]
for rank, (_, figure) in enumerate(run):
    assert figure.axes[0].lines[0].get_ydata().tolist() == [rank, rank + 1]
""")  # matplotlib shows figures that are new at the end of a cell
    assert sum("image/png" in display for display in cell.displays) == 2
