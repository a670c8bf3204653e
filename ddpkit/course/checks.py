"""`check`, `hint`, `solution`: an answer is run for real, on new inputs, and what it did is compared with what it should do."""

from __future__ import annotations

import ast
import html
import inspect
import os
import random
import re
import textwrap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ddpkit.course import card
from ddpkit.course.exercise import Exercise, Row, Seen, find
from ddpkit.errors import RankError
from ddpkit.show.still import _short
from ddpkit.spawn import spawn

LIMIT = 20.0
"""Seconds that an answer may run on one number of ranks. The longest reference needs less than one on two cores."""
WAIT = 10.0
"""Seconds that its ranks may stand still waiting for each other."""
LATE = 113
"""Exit status of a rank that ended itself because of `LIMIT`."""
_hints: dict[str, int] = {}


def check(id: str, answer: Any) -> None:
    """Run an answer on real ranks and show whether it is right; if not, the smallest input that fails, expected against got.

    Args:
        id: the exercise, such as "00.rank".
        answer: the function that you wrote, or a tuple of them where the exercise asks for several. `...` says that it is unfinished.

    Raises:
        ValueError: there is no such exercise. Whatever the answer does is shown and not raised.
    """
    exercise = find(id)
    functions = answer if isinstance(answer, tuple) else (answer,)
    if any(map(_unfinished, functions)):
        return _say_unfinished(id)
    wanted = _misfit(exercise, functions)
    if wanted:
        return _say_wrong(exercise, wanted)
    tries = random.Random()  # seeded by the system: an answer that holds the numbers of the last check fails this one
    for nprocs in exercise.world_sizes:
        inputs = exercise.inputs(tries, nprocs)
        try:
            run = spawn(_play, (id, functions, inputs, LIMIT), nprocs, timeout=WAIT, view=False)
        except (RuntimeError, TypeError, ValueError, OSError) as error:  # RankError, and all that spawn raises before it starts
            return _say_wrong(exercise, *_explain(exercise, error, nprocs))
        for number, one in enumerate(inputs):
            seen = Seen(nprocs, one, [values[number] for values in run.values], run.output, _names(functions))
            if any(value is ... for value in seen.values):
                return _say_unfinished(id)
            rows = exercise.rows(seen)
            if not all(row.same for row in rows):
                means = next((mistake.means for mistake in exercise.mistakes if mistake.when(seen)), "")
                return _say_wrong(exercise, f"It fails on {_ranks(nprocs)}{_given(exercise, one)}.", means, rows=rows)
    text = f"✓ {id} · {exercise.title}\n{exercise.shown}"
    return card.show(text, card.box(text.partition("\n")[0], card.lines(exercise.shown), card.GOOD))


def hint(id: str) -> None:
    """Show a hint, and at each call one more. Raises ValueError where there is no such exercise."""
    hints = find(id).hints
    number = _hints[id] = min(_hints.get(id, 0) + 1, len(hints))
    head = f"Hint {number} of {len(hints)} · {id}"
    more = f'\nThe solution: ddpkit.solution("{id}")' if number == len(hints) else ""
    card.show(f"{head}\n{hints[number - 1]}{more}", card.box(head, card.lines(hints[number - 1] + more)))


def solution(id: str) -> None:
    """Show one right answer. Raises ValueError where there is no such exercise."""
    source = "\n\n".join(inspect.getsource(function).rstrip() for function in find(id).solution)
    head = f"A solution · {id}"
    card.show(f"{head}\n\n{source}", card.box(head, card.code(source)))


def _play(rank: int, id: str, functions: tuple[Callable[..., Any], ...], inputs: list[tuple[Any, ...]], limit: float) -> list[Any]:
    """In a rank. The time limit is kept here, by the rank itself: the notebook then hears of it as of any other death."""
    clock = threading.Timer(limit, os._exit, (LATE,))
    clock.daemon = True
    clock.start()  # never cancelled: pickling the value, or a thread that was left behind, may hang as well
    play = find(id).play
    return [_plain(functions[0](rank, *one) if play is None else play(rank, *functions, *one)) for one in inputs]


@dataclass(frozen=True, repr=False)
class _Other:
    """Stands for an object of a class that no answer needs: only its text comes to the notebook, and no method of it is called there."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _plain(value: Any) -> Any:
    """Lists in place of tuples, tensors, arrays and numpy's numbers: the form is not what is asked for."""
    if type(value).__module__.partition(".")[0] in ("torch", "numpy") and hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return value if value is None or value is ... or type(value) in (bool, int, float, str) else _Other(_short(value))


def _unfinished(function: Any) -> bool:
    """Whether `...` still stands somewhere. Not where it is an index or in a type, such as x[..., 0]."""
    if function is ...:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False  # without source, what it returns tells
    indices = {inner for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)}
    return any(isinstance(node, ast.Constant) and node.value is ... and node not in indices for node in ast.walk(tree))


def _misfit(exercise: Exercise, functions: tuple[Any, ...]) -> str:
    """What the exercise takes, where this is something else."""
    names = [f"{function.__name__}({', '.join(inspect.signature(function).parameters)})" for function in exercise.solution]
    calls = ", ".join(function.__name__ for function in exercise.solution)
    wanted = f'Write {" and ".join(names)}, then: ddpkit.check("{exercise.id}", {calls if len(names) == 1 else f"({calls})"}).'
    if len(functions) != len(names) or not all(map(callable, functions)):
        return (
            f"{wanted} Give the functions themselves, without calling them. It was given {_short(functions if len(functions) > 1 else functions[0])}."
        )
    for function, reference in zip(functions, exercise.solution, strict=True):
        try:
            inspect.signature(function).bind(*inspect.signature(reference).parameters)
        except TypeError as error:
            return f"{wanted} Yours cannot be called so: {error}."
        except ValueError:
            pass  # some built-in functions do not tell
    return ""


def _names(functions: Iterable[Any]) -> frozenset[str]:
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for one in codes:  # grows meanwhile: functions inside functions
        codes += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return frozenset(name for one in codes for name in one.co_names)


def _explain(exercise: Exercise, error: Exception, nprocs: int) -> tuple[str, str, str]:
    if isinstance(error, RankError) and any(failure.kind == f"exit status {LATE}" for failure in error.failures):
        means = "A loop does not end, or a rank waits for another that never comes."
        return f"It did not finish within {LIMIT:g} s on {_ranks(nprocs)}.", means, ""
    report = str(error)
    means = next((means for pattern, means in exercise.failures if re.search(pattern, report)), "")
    return f"It ended in an error on {_ranks(nprocs)}.", means, report


def _ranks(nprocs: int) -> str:
    return f"{nprocs} rank{'s' * (nprocs != 1)}"


def _given(exercise: Exercise, one: tuple[Any, ...]) -> str:
    if exercise.play is not None or not one:
        return ""
    names = list(inspect.signature(exercise.solution[0]).parameters)[1:]
    return " with " + ", ".join(f"{name}={_short(value)}" for name, value in zip(names, one, strict=True))


def _say_unfinished(id: str) -> None:
    text = f'Not finished yet: replace the ... and run this cell again. ddpkit.hint("{id}") helps.'
    card.show(text, card.box(id, card.lines(text)))


def _say_wrong(exercise: Exercise, what: str, means: str = "", report: str = "", rows: Iterable[Row] = ()) -> None:
    head = f"✗ {exercise.id} · {exercise.title}"
    shown = [("✓" if row.same else "✗", row.what, _short(row.expected), _short(row.got)) for row in rows][:12]
    table = "".join("<tr>" + "".join(f"<td>{html.escape(cell, quote=False)}</td>" for cell in cells) + "</tr>" for cells in shown)
    if table:
        table = f'<table style="margin:.3em 0"><tr><th></th><th></th><th>expected</th><th>got</th></tr>{table}</table>'
    words = [text for text in (what, means) if text]
    plain = [f"  {mark} {label}: expected {expected}, got {got}" for mark, label, expected, got in shown]
    page = card.lines("\n".join(words)) + table + (card.code(report) if report else "")
    card.show("\n".join([head, *words, *plain, *report.splitlines()]), card.box(head, page, card.BAD))
