"""Explorers say in words what they draw, and their arithmetic is that of torch."""

from __future__ import annotations

import pytest
import torch

import ddpkit
from ddpkit.explore import explorer
from ddpkit.explore.gradients import PARTS, SAMPLES, _draw, _gradient, _shares


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0, 3.75])
def test_the_gradients_are_those_of_autograd(weight, loss):
    for share in {share for parts in PARTS for share in _shares(parts)}:
        x, w = torch.tensor(share, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64, requires_grad=True)
        getattr((w * x - 2 * x).square(), loss)().backward()
        assert _gradient(share, weight, loss) == pytest.approx(w.grad.item())


@pytest.mark.parametrize("parts", PARTS)
def test_all_samples_are_shared_out(parts):
    assert [x for share in _shares(parts) for x in share] == list(SAMPLES)


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
    text, _ = _draw(parts, 1.0, loss)
    assert [line.rpartition("= ")[2] for line in text.splitlines() if "step goes" in line] == steps
    assert text.endswith("The two steps are the same." if same else "The two steps differ.")


def test_the_text_says_all_that_the_picture_shows(capsys):
    ddpkit.explore.gradients()
    assert capsys.readouterr().out == (
        "w = 1, loss = mean of the squared errors\nrank 0, x = 1 2: gradient -5\nrank 1, x = 3 4: gradient -25\n"
        "mean of the ranks: -15, so a step goes to w = 1.15\none process, all samples: -15, so a step goes to w = 1.15\nThe two steps are the same.\n"
    )


def test_the_picture_follows_every_control(monkeypatch):
    shown = {}
    monkeypatch.setattr(explorer, "show", lambda controls, start, draw: shown.update(controls=controls(), start=start, draw=draw))
    ddpkit.explore.gradients()
    assert {name: control.value for name, control in shown["controls"].items()} == shown["start"]
    live = explorer._live(shown["controls"], "text", b"", shown["draw"])
    picture, last = live.children[-1], ""
    for name, value in {"parts": "2 + 1 + 1", "weight": 3.0, "loss": "sum"}.items():
        shown["controls"][name].value = value
        assert picture.value != last and 'role="status"' in picture.value
        last = picture.value
    assert "rank 2, x = 4: gradient 32" in last
