"""`%load_ext ddpkit`: the line magic `%ranks` and the cell magic `%%ranks`."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from ddpkit.ranks import Ranks


@magics_class
class RanksMagics(Magics):
    """Ranks that stay, for one notebook."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._ranks: Ranks | None = None

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Start, show, stop or restart ranks that stay; on top of a cell, run it in them.

        %ranks 4         start four ranks (in place of those that run)
        %ranks           show them
        %ranks stop      end them
        %ranks restart   end them and start new ones, with nothing in them
        %%ranks          run the cell in all ranks
        %%ranks 0        … in rank 0; also 1-3 and 0,2
        """
        what = line.strip()
        if cell is not None:
            # Lines are counted as in the notebook, where the magic is the first. (IPython drops an empty line there.)
            self._running().run(cell if cell.startswith("%%") else f"#\n{cell}", _some(what) if what else None)
        elif what.isdigit():
            if self._ranks is not None:
                self._ranks.stop()
            self._ranks = Ranks(int(what))
            print(f"{what} rank{'s' * (what != '1')} started. Put %%ranks on top of a cell to run it in them.")
        elif what == "stop":
            self._running().stop()
            self._ranks = None
        elif what == "restart":
            ranks = self._running()
            ranks.restart()
            print(f"{ranks.nprocs} rank{'s' * (ranks.nprocs != 1)} started anew.")
        elif what:
            raise UsageError(f"%ranks {what} is not known. Write %ranks 4, %ranks, %ranks stop or %ranks restart.")
        else:
            display(self._running())

    def _running(self) -> Ranks:
        if self._ranks is None:
            raise UsageError("No ranks run. Start some first: %ranks 4")
        return self._ranks


def _some(text: str) -> list[int]:
    """`0`, `1-3`, `0,2` as numbers."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = re.fullmatch(r"(\d+)(?:[-–](\d+))?", part)
        if found is None:
            raise UsageError(f"%%ranks {text} is not known. Write %%ranks, %%ranks 0, %%ranks 1-3 or %%ranks 0,2.")
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    return ranks
