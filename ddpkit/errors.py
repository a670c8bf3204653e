"""What a run can end in, other than values. All of them are `RankError`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpkit.spawn import Run

WIDTH = 110
"""Characters in a line of a report that is shown: what fits beside JupyterLab's side bar on a laptop."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended, where it did not return."""

    rank: int
    kind: str
    """The exception's type, such as "ValueError"; for a process that died, how: "SIGKILL", "exit status 3"."""
    text: str
    """The exception's message, or what is known about the death."""
    lines: tuple[str, ...] = ()
    """Where it happened: the user's own frames with their source, ready to print, outermost first."""
    cause: BaseException | None = field(default=None, compare=False)
    """The exception itself, where it could be brought back to the notebook."""
    doing: str = ""
    """The last collective that it called."""
    died: bool = False
    """Its process ended without an exception."""
    follows: bool = False
    """It failed only because another rank was gone."""


class RankError(RuntimeError):
    """A run that did not end well.

    Attributes:
        rank: the rank that is to blame (for several, the lowest).
        cause: its exception as an object; None where there is none, or it cannot be pickled.
        output: what each rank had written, by rank.
        failures: every rank's own `RankFailure`, the root cause first.
        run: the `Run` as far as it came, with what other ranks returned and logged. None where nothing was started.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure] = (), output: Sequence[str] = ()) -> None:
        # A cell's number changes with every run of it. It helps whoever looks at the notebook now, and has no place in a text that is kept and
        # compared.
        super().__init__(re.sub(r"\bCell In\[\d+\]", "Cell", message))
        self._report = message
        self.failures = tuple(failures)
        self.output = tuple(output)
        self.run: Run | None = None

    @property
    def rank(self) -> int | None:
        return self.failures[0].rank if self.failures else None

    @property
    def cause(self) -> BaseException | None:
        return self.failures[0].cause if self.failures else None

    def _render_traceback_(self, *_: Any, **__: Any) -> list[str]:
        """IPython shows this in place of a traceback: the report alone, without the frames of the kit."""
        # JupyterLab breaks long lines of an error in the middle of words.
        lines = f"{type(self).__name__}: {self._report}".splitlines()
        return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [line]


class RankFailed(RankError):
    """A rank's function raised an exception."""


class RankDied(RankError):
    """A rank's process ended without a value and without an exception: by a signal, or by ending itself."""


class RanksStuck(RankError):
    """Ranks wait for each other for ever, or have waited longer than their timeout."""


class RanksDisagree(RankError):
    """Ranks called unlike collectives, or hold unlike copies of one DDP model, and nobody stood still: the result is silent garbage."""


class LaunchFailed(RankError):
    """The ranks could not be started."""
