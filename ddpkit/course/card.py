"""What the course shows: one output that is equal from run to run, with controls in it where a person can use them."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any

from ddpkit.show import somebody_watches

WIDGET = "application/vnd.jupyter.widget-view+json"
"""A front end that can shows this in place of the text. Programs that compare notebooks leave it out."""
GOOD, BAD, NEUTRAL = "#00795a", "#a84f00", "#0072b2"


def box(heading: str, body: str, colour: str = NEUTRAL, attributes: str = "") -> str:
    """A frame as HTML around `body`, which is HTML. `heading` is text, `attributes` are the frame's own, such as an ARIA role."""
    head = f"<div><strong>{html.escape(heading, quote=False)}</strong></div>"
    return f'<div {attributes} style="border-left:4px solid {colour};padding:.3em .8em;line-height:1.5">{head}{body}</div>'


def lines(text: str) -> str:
    """Text as HTML, line by line."""
    return "".join(f"<div>{html.escape(line, quote=False)}</div>" for line in text.splitlines())


def code(text: str) -> str:
    """Source or a report as HTML."""
    return f'<pre style="margin:.3em 0;background:none;color:inherit;white-space:pre-wrap">{html.escape(text, quote=False)}</pre>'


def view_of(widget: Any) -> dict[str, Any]:
    """A widget's own entry for a bundle, without the text that it would add."""
    return {WIDGET: widget._repr_mimebundle_()[WIDGET]}


def show(text: str, page: str, make_widget: Callable[[], Any] | None = None) -> None:
    """Display `text` and `page` (the same as HTML), and for a person the widget instead. Print `text` where there is no IPython."""
    bundle: dict[str, Any] = {"text/plain": text, "text/html": page}
    if make_widget is not None and somebody_watches():
        bundle.update(view_of(make_widget()))
    display_bundle(bundle)


def display_bundle(bundle: dict[str, Any]) -> None:
    """Display what has several forms; print its text where there is no IPython."""
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        print(bundle["text/plain"])
        return
    from IPython.display import display

    display(bundle, raw=True)
