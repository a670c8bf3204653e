"""A new process cannot find what was typed into a cell, and closures, lambdas and callable objects cannot be pickled at all.

jupyter/notebook#6258, pytorch/pytorch#62943
"""

from __future__ import annotations

import pytest

CELL = """
import ddpkit
def tens(rank):
    return rank * 10
def adder(step):
    def inner(rank):          # a closure over step
        return rank + step
    return inner
class Scale:                  # a callable object
    def __init__(self, by):
        self.by = by
    def __call__(self, rank, fn):
        return fn(rank) * self.by
"""


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("tens", [0, 10]),
        ("adder(100)", [100, 101]),
        ("lambda rank, world_size: rank - world_size, (2,)", [-2, -1]),
        ("Scale(3), (lambda r: r + 1,)", [3, 6]),
    ],
)
def test_whatever_can_be_called_in_the_notebook_runs_in_ranks(kernel, start_method, call, values):
    kernel.check(CELL)
    cell = kernel.check(f"ddpkit.spawn({call}, start_method={start_method!r}).values")
    assert cell.result is not None and cell.result["text/plain"] == str(values)
    assert cell.stream == "" and cell.displays == []  # no child complains somewhere
