"""Explorers: the same text for every reader, controls for a person, and a finder that knows what the kit knows."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

import ddpkit
from ddpkit import errors
from ddpkit.explore import explorer
from ddpkit.symptoms import SYMPTOMS

WIDGET = "application/vnd.jupyter.widget-view+json"
finder = importlib.import_module("ddpkit.explore.symptoms")  # the package has functions of these names
bars = importlib.import_module("ddpkit.explore.gradients")
KINDS, find = finder.KINDS, finder.find


@pytest.fixture
def live(monkeypatch):
    """The controls that a person gets, and the page that follows them."""

    def show(call):
        made = []
        monkeypatch.setattr(explorer.card, "somebody_watches", lambda: True)
        monkeypatch.setattr(explorer.card, "display_bundle", made.append)
        monkeypatch.setattr(explorer.card, "view_of", lambda widget: made.append(widget) or {WIDGET: {}})
        call()
        widget, bundle = made
        *controls, page = widget.children
        return controls, page, bundle

    return show


def test_the_finder_shows_one_symptom_and_no_picture(capsys):
    for _ in range(2):
        assert ddpkit.explore.symptoms() is None
        out = capsys.readouterr().out.splitlines()
        assert out[:2] == ["You see: It stands still, and nobody reports an error", "Its name in ddpkit: RanksStuck."]
        assert out[2].startswith("Usually this means: a rank waits") and out[3].startswith("Try: find the line") and len(out) == 4


def test_the_finder_offers_every_symptom_and_every_error_of_the_kit(live):
    (see, _), page, bundle = live(ddpkit.explore.symptoms)
    assert len(see.options) == len(set(see.options)) == len(KINDS) + len(SYMPTOMS)
    told = {symptom.name for symptom in KINDS}
    assert told >= {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RankError)} - {"RankError"}
    assert set(bundle) == {"text/plain", "text/html", WIDGET} and page.value == bundle["text/html"]
    for symptom in (*KINDS, *SYMPTOMS):
        see.value = symptom.shown
        text = re.sub(r"<[^>]+>", "", page.value).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        assert f"{symptom.means}." in text and f"{symptom.cure}." in text and 'role="status"' in page.value


@pytest.mark.parametrize("symptom", [*KINDS, *SYMPTOMS], ids=lambda symptom: symptom.name)
def test_what_is_shown_of_a_symptom_is_found_again(symptom):
    known = find(symptom.shown)
    assert symptom.shown and symptom.means[-1] != "." != symptom.cure[-1]
    assert known is symptom or symptom in KINDS  # some of the kit's kinds are seen without any message


@pytest.mark.parametrize(
    ("pasted", "means"),
    [
        ("RuntimeError: [/gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:56522.", "its error is a follow-on"),
        ("RanksStuck: ranks 0 and 1 wait for ever: every rank waits for another or has ended.", "waits in a collective"),
        ("RankDied: rank 1 of 2 died: its process was killed by SIGKILL (signal 9).\nFollow-on: rank 0.", "memory ran out"),
        ("RankFailed: rank 0 of 2 failed: DistNetworkError: … EADDRINUSE, message: address already in use", "listens at MASTER_PORT"),
        ("Traceback (most recent call last):\n  File …\nKeyError: 'x'", "the code of that rank failed"),
        ("KeyError: 'x'", "No known symptom"),
    ],
)
def test_a_pasted_error_is_found(live, pasted, means):
    (see, paste), page, _ = live(ddpkit.explore.symptoms)
    paste.value = pasted
    assert means in page.value
    paste.value = " "
    assert see.options[0] in page.value


def test_a_person_gets_controls_and_a_program_the_same_text_without(kernel):
    code = "import ddpkit; ddpkit.explore.symptoms()"
    (alone,), (again,) = (kernel.check(code).displays for _ in range(2))
    assert alone == again and set(alone) == {"text/plain", "text/html"}
    (watched,) = kernel.check(code, allow_stdin=True).displays
    assert watched.pop(WIDGET)["model_id"] and watched == alone


def test_an_explorer_with_a_picture_keeps_it_and_its_text(live):
    import ipywidgets
    from matplotlib.figure import Figure

    def draw(n):
        figure = Figure(figsize=(1, 1))
        figure.subplots().plot([0, n])
        return f"a line to {n} < 9", figure

    (slider,), page, bundle = live(lambda: explorer.show(lambda: {"n": ipywidgets.IntSlider(1, 0, 5)}, {"n": 1}, draw))
    assert set(bundle) == {"text/plain", "image/png", WIDGET} and bundle["text/plain"] == "a line to 1 < 9"
    before = page.value
    assert bundle["image/png"] in before
    slider.value = 4
    assert page.value != before and "a line to 4 &lt; 9" in page.value and 'alt=""' in page.value


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0, 3.75])
def test_the_gradients_in_bars_are_those_of_autograd(weight, loss):
    for share in {share for parts in bars.PARTS for share in bars._shares(parts)}:
        x, w = torch.tensor(share, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64, requires_grad=True)
        getattr((w * x - 2 * x).square(), loss)().backward()
        assert bars._gradient(share, weight, loss) == pytest.approx(w.grad.item())


@pytest.mark.parametrize("parts", bars.PARTS)
def test_all_samples_are_shared_out(parts):
    assert [x for share in bars._shares(parts) for x in share] == list(bars.SAMPLES)


@pytest.mark.parametrize(
    ("parts", "loss", "steps", "same"),
    [
        ("2 + 2", "mean", ["1.15", "1.15"], True),
        ("4", "sum", ["1.6", "1.6"], True),
        ("2 + 2", "sum", ["1.3", "1.6"], False),
        ("3 + 1", "mean", ["1.207", "1.15"], False),
    ],
)
def test_the_steps_are_those_of_ranks_and_of_one_process(parts, loss, steps, same):
    text, _ = bars._draw(parts, 1.0, loss)
    assert [line.rpartition("= ")[2] for line in text.splitlines() if "step goes" in line] == steps
    assert text.endswith("The two steps are the same." if same else "The two steps differ.")


def test_the_bars_are_said_in_words_too(capsys):
    ddpkit.explore.gradients()
    assert capsys.readouterr().out == (
        "w = 1, loss = mean of the squared errors\nrank 0, x = 1 2: gradient -5\nrank 1, x = 3 4: gradient -25\n"
        "mean of the ranks: -15, so a step goes to w = 1.15\none process, all samples: -15, so a step goes to w = 1.15\nThe two steps are the same.\n"
    )


def test_the_bars_follow_every_control(live):
    (parts, weight, loss), page, bundle = live(ddpkit.explore.gradients)
    assert set(bundle) == {"text/plain", "image/png", WIDGET}
    seen = [page.value]
    for control, value in ((parts, "2 + 1 + 1"), (weight, 3.0), (loss, "sum"), (weight, 2.0)):
        control.value = value
        assert page.value not in seen
        seen.append(page.value)
    assert "rank 2, x = 4: gradient 32" in seen[-2] and "The two steps are the same." in seen[-1]
