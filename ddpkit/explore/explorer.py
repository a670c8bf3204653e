"""What all explorers share: controls, a picture that follows them, and a still state for those who cannot use controls."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from typing import Any

from ddpkit.course import card


def show(controls: Callable[[], dict[str, Any]], start: dict[str, Any], draw: Callable[..., tuple[str, Any]]) -> None:
    """Display an explorer.

    Args:
        controls: makes the ipywidgets, by the name of the value that each sets. Called only where a person can use them.
        start: the values at the beginning.
        draw: from the values to a text that says it all, and a matplotlib figure that shows it, or None where the text is all.
    """
    text, figure = draw(**start)
    png = _png(figure)
    bundle: dict[str, Any] = {"text/plain": text, "image/png": png} if png else {"text/plain": text, "text/html": _page(text)}
    if card.somebody_watches():
        bundle.update(card.view_of(_live(controls(), text, png, draw)))
    card.display_bundle(bundle)


def _live(controls: dict[str, Any], text: str, png: str, draw: Callable[..., tuple[str, Any]]) -> Any:
    import ipywidgets as widgets

    picture = widgets.HTML(_page(text, png))

    def follow(_change: Any) -> None:
        now, figure = draw(**{name: control.value for name, control in controls.items()})
        picture.value = _page(now, _png(figure))

    for control in controls.values():
        control.observe(follow, "value")
    return widgets.VBox([*controls.values(), picture])


def _page(text: str, png: str = "") -> str:
    # role=status: a screen reader reads the text again when it changes.
    if not png:
        head, _, rest = text.partition("\n")
        return card.box(head, card.lines(rest), attributes='role="status"')
    picture = f'<img alt="" style="max-width:100%" src="data:image/png;base64,{png}">'
    return f'{picture}<pre role="status" style="margin:0;background:none;color:inherit;white-space:pre-wrap">{html.escape(text, quote=False)}</pre>'


def _png(figure: Any) -> str:
    """A figure as a notebook keeps it; empty for none."""
    if figure is None:
        return ""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return base64.b64encode(buffer.getvalue()).decode()
