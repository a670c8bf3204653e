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


def shown(kernel: Any, running: str, *texts: str) -> None:
    """Wait until a running cell has shown all these."""
    seen = ""
    for text in texts:
        if text not in seen:
            cell = kernel.finish(running, until=text)
            seen += cell.shown + "".join(str(update.get("text/plain")) for update in [*cell.displays, *cell.updates])
        assert text in seen


def program(code: str, *arguments: str, before: tuple[str, ...] = (), timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that imports ddpkit; `before`: a command that starts it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*before, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)
