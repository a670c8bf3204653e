"""`predict`: choose before you look. The next cell's real run is what checks the answer."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from ddpkit.course import card

_NEXT = "Choose, then run the next cell to see."


def predict(question: str, options: Sequence[str], answer: str, because: str) -> None:
    """Ask what will happen. A person chooses one of the options, and is then told what happens and why.

    Where nobody can choose (nbval, nbconvert, papermill, plain Python), question and options are shown as text, without the answer.

    Args:
        question: what to predict, in one sentence.
        options: two or more different answers. Radio buttons: Tab goes from one to the next, the space bar chooses.
        answer: the one of `options` that happens.
        because: the reason, shown after the choice, whichever it was.

    Raises:
        TypeError: something is not a string. ValueError: fewer than two options, two equal ones, or `answer` is none of them.
    """
    if isinstance(options, str) or not all(isinstance(text, str) for text in (question, answer, because, *options)):
        raise TypeError("predict takes strings: a question, a list of options, the answer (one of the options), and the reason.")
    if len(options) < 2 or len(set(options)) < len(options):
        raise ValueError(f"predict needs at least two options, all different; they are {list(options)}.")
    if answer not in options:
        raise ValueError(f"the answer must be one of the options {list(options)}; it is {answer!r}.")
    text = "\n".join([f"Predict: {question}", *(f"  ○ {option}" for option in options), _NEXT])
    items = "".join(f"<li>{html.escape(option, quote=False)}</li>" for option in options)
    page = card.box("Predict", card.lines(question) + f'<ul style="margin:.3em 0">{items}</ul><em>{_NEXT}</em>')
    card.show(text, page, lambda: _ask(question, options, answer, because))


def _ask(question: str, options: Sequence[str], answer: str, because: str) -> Any:
    import ipywidgets as widgets

    # The prompt is the label of the group. Each button is in a label of its own, and Tab reaches each without choosing it.
    head = widgets.HTML(card.box("Predict", card.lines(question)))
    buttons = widgets.RadioButtons(options=list(options), index=None, tooltip=question, layout={"width": "auto", "margin": "0 0 0 1em"})
    verdict = widgets.HTML()

    def chosen(change: Any) -> None:
        buttons.disabled = True  # a prediction is made once; running the cell again asks again
        right = change["new"] == answer
        heading = "✓ Right." if right else f"Not what happens. It is: {answer}"
        # role=status: a screen reader reads it when it appears.
        verdict.value = card.box(heading, card.lines(because), card.GOOD if right else card.BAD, 'role="status"')

    buttons.observe(chosen, "value")
    return widgets.VBox([head, buttons, verdict])
