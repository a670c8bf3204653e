"""What a cell did in several ranks: alike once, unlike side by side."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpkit.show.palette import rank_colour

if TYPE_CHECKING:
    from ddpkit.ranks import Cells

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MAX_TEXT = 100_000
"""Characters shown of a rank."""


def groups(cells: Cells) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Ranks that showed the same, with what they showed; ranks that showed nothing are left out."""
    found: list[tuple[list[int], list[dict[str, Any]]]] = []
    for rank in cells.ranks:
        pieces = list(cells.pieces(rank))
        if not pieces:
            continue
        for ranks, known in found:
            if known == pieces:
                ranks.append(rank)
                break
        else:
            found.append(([rank], pieces))
    return found


def name_of(ranks: Sequence[int]) -> str:
    """Ranks in few words: `rank 2`, `ranks 0–3`, `ranks 0, 2, 5–7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}{'–' if len(run) > 2 else ', '}{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {words}"


def _text(pieces: Sequence[dict[str, Any]]) -> str:
    text = _ANSI.sub("", "\n".join(str(piece.get("text/plain", "")) for piece in pieces))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"


def text_of(cells: Cells) -> str:
    """As text: each line with the ranks that showed it."""
    parts = [(name_of(ranks), _text(pieces)) for ranks, pieces in groups(cells)]
    width = max((len(name) for name, _ in parts), default=0)
    return "\n".join(f"{name:<{width}} │ {line}" for name, text in parts for line in text.split("\n"))


def html_of(cells: Cells) -> str:
    """As HTML: one column for each group of ranks; where there are several, what differs from the first is marked."""
    found = groups(cells)
    first = _text(found[0][1]) if found else ""
    columns = []
    for ranks, pieces in found:
        look = f"background:{rank_colour(ranks[0])};color:#ffffff;padding:0 .6em;border-radius:2px;white-space:nowrap"
        badge = f'<span style="{look}">{name_of(ranks)}</span>'
        plain = all(set(piece) <= {"text/plain"} for piece in pieces)
        body = (
            _pre(_marked(first, _text(pieces)) if plain and pieces is not found[0][1] else html.escape(_text(pieces), quote=False)) if plain else ""
        )
        body = body or "".join(map(_rich, pieces))
        columns.append(f'<div style="flex:1 1 16em;min-width:0;margin:2px 1em 4px 0">{badge}{body}</div>')
    style = "display:flex;flex-wrap:wrap;font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);line-height:1.45"
    return f'<div style="{style}">{"".join(columns)}</div>'


def bundle_of(cells: Cells) -> dict[str, str]:
    """For Jupyter."""
    return {"text/plain": text_of(cells), "text/html": html_of(cells)}


def card(rows: Sequence[dict[str, Any]]) -> str:
    """The state of ranks that stay, as a table."""
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("rank", "pid", "state", "process group", "memory"))
    body = "".join(
        f'<tr><td style="text-align:left"><span style="background:{rank_colour(row["rank"])};color:#ffffff;padding:0 .6em;border-radius:2px">'
        f"rank {row['rank']}</span></td><td>{row['pid']}</td><td>{html.escape(str(row['state']))}</td>"
        f"<td>{ {True: 'formed', False: 'none yet', None: '–'}[row['group']] }</td><td>{row['memory']:,} MB</td></tr>"
        for row in rows
    )
    return f'<table style="margin:0"><tr>{head}</tr>{body}</table>'


def _pre(content: str) -> str:
    return f'<pre style="margin:0;padding:0;background:none;color:inherit;font:inherit;white-space:pre-wrap;overflow-wrap:anywhere">{content}</pre>'


def _rich(piece: dict[str, Any]) -> str:
    if "text/html" in piece:
        return str(piece["text/html"])
    if "image/svg+xml" in piece:
        return str(piece["image/svg+xml"])
    for kind in ("image/png", "image/jpeg"):
        if kind in piece:
            alt = html.escape(str(piece.get("text/plain", "a picture")))
            return f'<br><img alt="{alt}" style="max-width:100%" src="data:{kind};base64,{str(piece[kind]).strip()}">'
    return _pre(html.escape(_text([piece]), quote=False))


def _marked(first: str, other: str) -> str:
    """The other text, what is not in the first one marked. A number is marked as a whole: 2.09 beside 2.07, and 2.18 beside -2.18."""
    here, there = (re.findall(r"\s+|[-+]?\d[\w.]*|\w+|[^\w\s]", text[:5000]) for text in (first, other))
    pieces = [(kind, start, end) for kind, _, _, start, end in difflib.SequenceMatcher(None, here, there, autojunk=False).get_opcodes()]
    if len(here) == len(there):  # place by place: in 1, 2, 3 beside 0, 1, 2 all three differ, and not only the last
        pieces = [("equal" if here[i] == there[i] else "replace", i, i + 1) for i in range(len(there))]
    out = []
    for kind, start, end in pieces:
        text = html.escape("".join(there[start:end]), quote=False)
        out.append(text if kind == "equal" or not text.strip() else f'<mark style="background:#ffd54a;color:#000000">{text}</mark>')
    return "".join(out) + html.escape(other[5000:], quote=False)
