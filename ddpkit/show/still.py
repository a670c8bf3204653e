"""A run as a still picture: equal from run to run, ranks in order, so that a saved notebook can be compared."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from ddpkit.show.palette import rank_colour

if TYPE_CHECKING:
    from ddpkit.spawn import Run
    from ddpkit.transcript import Transcript

MAX_LINES = 2000
"""Lines shown of all ranks together, at least 20 of each. More would make the browser slow; `run.output` has them all."""
MAX_WIDTH = 2000
"""Characters shown of a line."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown_lines(transcript: Transcript, rank: int, nprocs: int) -> list[str]:
    """A rank's lines as they are shown: of too many the first and the last, with a note on where the rest is."""
    lines = [_ANSI.sub("", line) for line in transcript.lines()]
    most = max(20, MAX_LINES // nprocs)
    if len(lines) > most:
        half = most // 2
        more = len(lines) - 2 * half
        lines = [*lines[:half], f"… {more:,} more lines: all of them are in output[{rank}] …", *lines[-half:]]
    return [line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}… ({len(line) - MAX_WIDTH:,} more characters)" for line in lines]


def output_text(run: Run) -> str:
    """What the ranks wrote, ranks in order, each line marked with its rank; empty where they wrote nothing."""
    width = len(str(run.nprocs - 1))
    return "\n".join(
        f"rank {rank:>{width}} │ {line}" for rank, transcript in enumerate(run.transcripts) for line in shown_lines(transcript, rank, run.nprocs)
    )


def output_html(run: Run) -> str:
    """The same as HTML: one block for each rank that wrote something."""
    blocks = []
    for rank, transcript in enumerate(run.transcripts):
        lines = shown_lines(transcript, rank, run.nprocs)
        if lines:
            blocks.append(
                f'<div style="display:flex;align-items:flex-start;margin:1px 0">'
                f'<span style="flex:none;background:{rank_colour(rank)};color:#ffffff;padding:0 .6em;margin-right:.8em;border-radius:2px;'
                f'min-width:4em;text-align:center">rank {rank}</span>'
                f'<pre style="flex:1;min-width:0;margin:0;padding:0;background:none;color:inherit;font:inherit;white-space:pre-wrap;'
                f'overflow-wrap:anywhere">{html.escape(chr(10).join(lines), quote=False)}</pre></div>'
            )
    style = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);line-height:1.45"
    return f'<div style="{style}">{"".join(blocks)}</div>'


def output_bundle(run: Run) -> dict[str, str]:
    """Both, for Jupyter."""
    return {"text/plain": output_text(run), "text/html": output_html(run)}


def text_of(run: Run) -> str:
    """A run in words: what the ranks wrote, where that is not on the screen already, and what they returned."""
    ranks = f"{run.nprocs} rank{'s' * (run.nprocs != 1)}"
    text = f"{run.name} ran on {ranks}"
    if any(value is not None for value in run.values):
        width = len(str(run.nprocs - 1))
        text += " and returned\n" + "\n".join(f"rank {rank:>{width}} → {_short(value)}" for rank, value in enumerate(run.values))
    written = "" if run._shown else output_text(run)
    return f"{written}\n{text}" if written else text


def bundle_of(run: Run) -> dict[str, str]:
    """A run for Jupyter."""
    rows = "".join(
        f'<tr><th style="text-align:left;padding:1px .8em 1px 0"><span style="background:{rank_colour(rank)};color:#ffffff;padding:0 .6em;'
        f'border-radius:2px;font-weight:normal">rank {rank}</span></th><td style="text-align:left">'
        f"<code>{html.escape(_short(value))}</code></td></tr>"
        for rank, value in enumerate(run.values)
        if any(v is not None for v in run.values)
    )
    ranks = f"{run.nprocs} rank{'s' * (run.nprocs != 1)}"
    table = f'<table style="margin:0">{rows}</table>' if rows else ""
    page = f"<div><code>{html.escape(run.name)}</code> ran on {ranks}{' and returned' if rows else ''}{table}</div>"
    return {"text/plain": text_of(run), "text/html": page if run._shown or not output_text(run) else output_html(run) + page}


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__
        text = f"<its __repr__ raised {type(error).__name__}>"
    text = re.sub(r"\s*\n\s*", " ", text)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text) - 300:,} more characters)"
