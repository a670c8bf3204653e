"""A run while it goes on.

In a notebook before a person: one output that changes, and in the end is the still picture. In a notebook that a program runs (nbval,
nbconvert, papermill): the still picture alone, once. Such programs do not know outputs that change, and keep the first state or all of them;
what they have in common is that nobody can answer, so they do not allow `input()`. In a terminal: lines as they come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ddpkit.show import still, together

INTERVAL = 0.1
"""Seconds between two updates, at least."""


class Screen(Protocol):
    """Where a run is shown while it goes on."""

    def lines(self, rank: int, lines: list[str]) -> None:
        """A rank has written these."""

    def update(self, run: Any) -> None:
        """Something has happened; called often, shown at most ten times a second."""


class _Nowhere:
    def lines(self, rank: int, lines: list[str]) -> None:
        pass

    def update(self, run: Any) -> None:
        pass


class _Terminal(_Nowhere):
    def __init__(self, nprocs: int) -> None:
        self._width = len(str(nprocs - 1))

    def lines(self, rank: int, lines: list[str]) -> None:
        if lines:
            print("\n".join(f"rank {rank:>{self._width}} │ {line}" for line in lines), flush=True)


class _Notebook(_Nowhere):
    def __init__(self, bundle: Callable[[Any], dict[str, str]]) -> None:
        self._bundle = bundle
        self._handle: Any = None
        self._due = 0.0
        self._last = ""

    def update(self, run: Any) -> None:
        now = time.monotonic()
        if now >= self._due:
            self.draw(run)
            # Drawing takes time of the kernel's, which shares the cores with the ranks: at most a tenth of it.
            self._due = time.monotonic() + max(INTERVAL, 10 * (time.monotonic() - now))

    def draw(self, run: Any) -> None:
        from IPython.display import display

        bundle = self._bundle(run)
        if not bundle["text/plain"] or bundle["text/plain"] == self._last:
            return
        self._last = bundle["text/plain"]
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


@contextmanager
def nothing() -> Iterator[Screen]:
    """Show nothing."""
    yield _Nowhere()


@contextmanager
def watch(run: Any) -> Iterator[Screen]:
    """Show a run while it goes on, and its output as a still picture in the end, however it ends."""
    if _kernel() is None:
        yield _Terminal(run.nprocs)
        return
    with _in_notebook(run, still.output_bundle) as screen:
        yield screen


@contextmanager
def watch_cells(cells: Any) -> Iterator[Screen]:
    """Show what ranks that stay do in a cell, while they do it."""
    if _kernel() is not None:
        with _in_notebook(cells, together.bundle_of) as screen:
            yield screen
        return
    yield _Nowhere()
    if text := together.text_of(cells):
        print(text, flush=True)


@contextmanager
def _in_notebook(thing: Any, bundle: Callable[[Any], dict[str, str]]) -> Iterator[Screen]:
    notebook = _Notebook(bundle)
    try:
        yield notebook if somebody_watches() else _Nowhere()
    finally:
        notebook.draw(thing)


def _kernel() -> Any:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None)


def somebody_watches() -> bool:
    """Whether this is a notebook before a person, who can click: not a plain Python, not nbval, nbconvert or papermill."""
    kernel = _kernel()
    if kernel is None:
        return False
    try:
        return bool(kernel.get_parent("shell")["content"]["allow_stdin"])
    except (AttributeError, KeyError, TypeError):
        return True
