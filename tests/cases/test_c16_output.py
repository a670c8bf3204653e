"""What ranks print goes to the terminal, comes mixed or not at all; megabytes of it freeze the browser.

ipython/ipykernel#882, jupyter/notebook#2364
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says


def talk(rank, lines, width):
    import logging
    import sys

    logging.basicConfig(level=logging.INFO, force=True)
    for i in range(lines):
        print(f"<{rank}:{i}:" + "x" * width + ">")
    logging.getLogger("train").info("log line of rank %d", rank)
    sys.stdout.write(f"no newline at end {rank}")
    return lines


def wanted(rank, lines, width):
    return [*(f"<{rank}:{i}:" + "x" * width + ">" for i in range(lines)), f"INFO:train:log line of rank {rank}", f"no newline at end {rank}"]


@pytest.mark.usefixtures("nothing_left")
def test_every_line_is_whole_and_in_order(start_method):
    run = ddpkit.spawn(talk, (200, 50), start_method=start_method, view=False)
    assert run.values == [200, 200]
    assert [text.splitlines() for text in run.output] == [wanted(rank, 200, 50) for rank in (0, 1)]


@pytest.mark.usefixtures("nothing_left")
def test_ten_megabytes_are_kept():
    run = ddpkit.spawn(talk, (20_000, 250), view=False)
    assert run.values == [20_000, 20_000]
    assert [text.splitlines() for text in run.output] == [wanted(rank, 20_000, 250) for rank in (0, 1)]


@pytest.mark.usefixtures("nothing_left")
def test_last_words_before_an_abort_are_there(start_method):
    def crash(rank):
        import os
        import time

        print(f"just before the end of {rank}")  # would sit in a buffer
        if rank == 1:
            os.abort()
        time.sleep(300)

    error = fails(ddpkit.RankDied, crash, start_method=start_method)
    says(error, "rank 1 of 2 died: ", "SIGABRT", "in crash\n", "os.abort()", "Its last words: just before the end of 1")
    assert error.output[1] == "just before the end of 1\n"


CELL = """
import ddpkit, logging, sys
def talk(rank, lines, width):
    logging.basicConfig(level=logging.INFO, force=True)
    for i in range(lines):
        print(f"<{rank}:{i}:" + "x" * width + ">")
    logging.getLogger("train").info("log line of rank %d", rank)
    sys.stdout.write(f"no newline at end {rank}")
    return lines
"""


def test_a_cell_shows_each_line_with_its_rank(kernel):
    kernel.check(CELL)
    cell = kernel.check("assert ddpkit.spawn(talk, (200, 50)).values == [200, 200]")
    assert cell.stream == ""
    (display,) = cell.displays
    assert display["text/plain"].splitlines() == [f"rank {rank} │ {line}" for rank in (0, 1) for line in wanted(rank, 200, 50)]


def test_a_cell_shows_a_part_of_very_much_and_says_where_the_rest_is(kernel):
    kernel.check(CELL)
    cell = kernel.check("run = ddpkit.spawn(talk, (20_000, 250))\nassert run.values == [20_000, 20_000]")
    (display,) = cell.displays
    assert len(display["text/html"]) < 1_000_000 and len(display["text/plain"]) < 1_000_000
    for rank in (0, 1):
        says(display["text/plain"], f"rank {rank} │ <{rank}:0:", "more lines: all of them are in output", f"rank {rank} │ no newline at end {rank}")
    kernel.check("assert all(len(text.splitlines()) == 20_002 for text in run.output)")
