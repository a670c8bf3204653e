"""What an exercise is. A lesson's exercises are the `EXERCISES` of its `lesson_NN.py`."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Seen:
    """What an answer did with one input on `nprocs` ranks."""

    nprocs: int
    inputs: tuple[Any, ...]
    values: Sequence[Any]
    """What each rank returned, by rank: lists in place of tuples, tensors and arrays."""
    output: Sequence[str]
    """What each rank printed in the whole run, by rank."""
    uses: frozenset[str]
    """The names that the answer's code uses, such as "append"."""


class Row(NamedTuple):
    """One thing that is compared, such as a rank's value."""

    what: str
    expected: Any
    got: Any

    @property
    def same(self) -> bool:
        """Equal in type too: a value that claims to be equal to everything is not."""
        return _same(self.expected, self.got)


class Mistake(NamedTuple):
    """A well-known wrong answer: how it looks from outside, and what it means."""

    when: Callable[[Seen], bool]
    means: str


@dataclass(frozen=True)
class Exercise:
    """Something to write, and how to tell whether it is right."""

    id: str
    """The lesson's number and a word, such as "00.rank"."""
    title: str
    solution: tuple[Callable[..., Any], ...]
    """The functions to write, written well. Their names and parameters are those that an answer must have."""
    hints: tuple[str, str, str]
    shown: str
    """What a right answer has shown, as a sentence."""
    world_sizes: tuple[int, ...]
    """How many ranks it is tried on, ascending, so that the first failure is the smallest."""
    inputs: Callable[[random.Random, int], list[tuple[Any, ...]]]
    """`inputs(random, nprocs)`: new inputs, small ones first. For a plain exercise, each is the arguments after rank."""
    rows: Callable[[Seen], list[Row]]
    """What is compared with what, for one input."""
    mistakes: tuple[Mistake, ...] = ()
    """The first that fits is the one that is told."""
    failures: tuple[tuple[str, str], ...] = ()
    """The same for answers that raise: a regular expression on the error's report, and what it means."""
    play: Callable[..., Any] | None = None
    """`play(rank, *functions, *inputs)` in each rank; what it returns is in `Seen.values`. None calls the answer itself."""


def catalogue() -> dict[str, Exercise]:
    """All exercises by id, in the order of the lessons."""
    import ddpkit.course

    found: dict[str, Exercise] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(ddpkit.course.__path__) if info.name.startswith("lesson_")):
        found.update((exercise.id, exercise) for exercise in import_module(f"ddpkit.course.{module}").EXERCISES)
    return found


def find(id: str) -> Exercise:
    """The exercise with this id. Raises ValueError, naming those that there are."""
    known = catalogue()
    if id not in known:
        raise ValueError(f"there is no exercise {id!r}. There are: {', '.join(known)}.")
    return known[id]


def _same(expected: Any, got: Any) -> bool:
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(_same, expected, got))
    return bool(expected == got)
