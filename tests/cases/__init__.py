"""Troubles that many have met with distributed training in notebooks, each as a test of what the kit does about it.

The numbers are those of our own list; each file names public threads in which people met the trouble.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ddpkit
from tests.leftovers import processes

ROOT = Path(__file__).parents[2]


def fails(expected: type[BaseException], fn: Any, args: tuple[Any, ...] = (), *, within: float = 20.0, **options: Any) -> Any:
    """Run what must fail, within so many seconds; returns the error."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        ddpkit.spawn(fn, args, view=False, **options)
    seconds = time.monotonic() - began
    assert type(caught.value) is expected
    assert seconds < within
    return caught.value


def says(text: object, *parts: str) -> None:
    """The text has all these parts, in this order."""
    text, place = str(text), 0
    for part in parts:
        found = text.find(part, place)
        assert found >= 0, f"{part!r} is missing, or in the wrong place, in:\n{text}"
        place = found + len(part)


def settle(seconds: float = 5.0) -> list[str]:
    """Wait until all processes below this one are gone; returns those that are not. The last one ends a moment after its last word."""
    deadline = time.monotonic() + seconds
    while processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    return processes()


def shown(kernel: Any, running: str, *texts: str) -> None:
    """Wait until a running cell has shown all these."""
    seen = ""
    for text in texts:
        if text not in seen:
            cell = kernel.finish(running, until=text)
            seen += cell.shown + "".join(str(update.get("text/plain")) for update in [*cell.displays, *cell.updates])
        assert text in seen


def program(
    folder: Path, code: str, *arguments: str, before: tuple[str, ...] = (), timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program that imports ddpkit, from a file in this folder; `before`: a command that starts it."""
    file = folder / "program.py"
    file.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [*before, sys.executable, str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=folder, **options)
