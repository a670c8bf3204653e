"""Exercises of lesson 00: two processes from one cell."""

from __future__ import annotations

import os
import random
import re
from typing import Any

from ddpkit.course.exercise import Exercise, Mistake, Row, Seen


def hello(rank: int) -> None:
    """Print who this rank is, and of how many."""
    world_size = os.environ["WORLD_SIZE"]
    print(f"rank {rank} of {world_size}")


def squares(rank: int, n: int) -> list[int]:
    """The squares of this rank's share of range(n): rank, rank + world size and so on."""
    world_size = int(os.environ["WORLD_SIZE"])
    return [i * i for i in range(rank, n, world_size)]


def _lines(seen: Seen) -> list[Row]:
    return [Row(f"rank {rank} prints", f"rank {rank} of {seen.nprocs}", text.rstrip()) for rank, text in enumerate(seen.output)]


def _all_print(seen: Seen, *forms: str) -> bool:
    """Whether there is a form that fits what every rank printed: a format string of r (the rank) and n (the world size)."""
    return any(all(text.rstrip() == form.format(r=rank, r1=rank + 1, n=seen.nprocs) for rank, text in enumerate(seen.output)) for form in forms)


def _fixed_world(seen: Seen) -> bool:
    return all(re.fullmatch(rf"rank {rank} of \d+", text.rstrip()) for rank, text in enumerate(seen.output))


def _some(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    return [(nprocs + random.randint(1, 3),), (random.randint(20, 60),)]


def _parts(seen: Seen) -> list[Row]:
    whole = [i * i for i in range(seen.inputs[0])]
    return [Row(f"rank {rank} returns", whole[rank :: seen.nprocs], value) for rank, value in enumerate(seen.values)]


def _nothing(seen: Seen) -> bool:
    return all(value is None for value in seen.values)


EXERCISES = (
    Exercise(
        id="00.rank",
        title="Print your rank",
        solution=(hello,),
        hints=(
            "The first argument of the function is the rank. It differs in every process.",
            'How many ranks there are is in the environment of each: os.environ["WORLD_SIZE"].',
            'One line, put together from both: print(f"rank {rank} of {…}").',
        ),
        shown="On 1, 2 and 3 real ranks, every rank knows its own number and how many there are.",
        world_sizes=(1, 2, 3),
        inputs=lambda _random, _nprocs: [()],
        rows=_lines,
        mistakes=(
            Mistake(
                lambda seen: _all_print(seen, "rank {r1} of {n}"),
                "This counts from 1. Ranks count from 0, so the last of them is WORLD_SIZE - 1.",
            ),
            Mistake(
                lambda seen: _all_print(seen, "rank {r}", "{r}"),
                "This prints the rank and not how many ranks there are. That is in the environment, as WORLD_SIZE.",
            ),
            Mistake(
                _fixed_world, "The number of ranks is written into the code. It must come from WORLD_SIZE: the same function runs on any number."
            ),
            Mistake(lambda seen: not any(seen.output) and not _nothing(seen), "This returns the text. Here it is to be printed, with print(...)."),
        ),
    ),
    Exercise(
        id="00.values",
        title="Return a value from each rank",
        solution=(squares,),
        hints=(
            "Rank 0 of 3 has the numbers 0, 3, 6, …; rank 1 has 1, 4, 7, …",
            'The world size comes as text: int(os.environ["WORLD_SIZE"]). range(start, stop, step) then gives a rank its numbers.',
            "Build the list inside the function and return it. What a rank returns is all that comes back to the notebook.",
        ),
        shown="On 1, 2 and 3 real ranks, each returns its own part, and the parts together are what one process computes.",
        world_sizes=(1, 2, 3),
        inputs=_some,
        rows=_parts,
        mistakes=(
            Mistake(
                lambda seen: _nothing(seen) and bool(seen.uses & {"append", "extend"}),
                "This fills a list and returns nothing. Each rank fills a copy of its own, and the copy ends with its process: return the list.",
            ),
            Mistake(
                lambda seen: _nothing(seen) and any(seen.output),
                "This prints the squares and returns nothing. Printed text is for people; only what is returned comes back as a value.",
            ),
            Mistake(
                lambda seen: all(value == [i * i for i in range(seen.inputs[0])] for value in seen.values),
                "Every rank does the whole work. Nothing shares it out by itself: each rank must pick its own part by its number.",
            ),
            Mistake(
                lambda seen: all(value == [i * i for i in range(rank, seen.inputs[0], 2)] for rank, value in enumerate(seen.values)),
                "This is right on 2 ranks only: the world size is written into the code. It must come from WORLD_SIZE.",
            ),
        ),
    ),
)
