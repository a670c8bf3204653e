"""What gradient does each rank compute from its part of the batch, and what is their mean? For one weight and four samples."""

from __future__ import annotations

from typing import Any

from ddpkit.explore import explorer
from ddpkit.show.palette import rank_colour

SAMPLES, TARGET, RATE = (1, 2, 3, 4), 2, 0.01
"""The samples x, the weight that is right for them (y = 2 x), and the learning rate of the step."""
PARTS = ("2 + 2", "3 + 1", "1 + 3", "1 + 1 + 1 + 1", "2 + 1 + 1", "4")
"""How many samples each rank has."""


def gradients() -> None:
    """Show each rank's gradient, their mean, and that of one process as bars; controls choose the parts, the weight and the loss.

    The model is y = w x, the target 2 x, the samples 1, 2, 3 and 4, the loss the mean or the sum of the squared errors of a part.
    """

    def controls() -> dict[str, Any]:
        import ipywidgets as widgets

        wide: dict[str, Any] = {"style": {"description_width": "9em"}, "layout": {"width": "min(30em, 100%)"}}
        return {
            "parts": widgets.Dropdown(options=PARTS, description="samples on ranks", **wide),
            "weight": widgets.FloatSlider(1.0, min=0.0, max=4.0, step=0.25, description="weight w", **wide),
            "loss": widgets.Dropdown(options=["mean", "sum"], description="loss of a part", **wide),
        }

    explorer.show(controls, {"parts": PARTS[0], "weight": 1.0, "loss": "mean"}, _draw)


def _draw(parts: str, weight: float, loss: str) -> tuple[str, Any]:
    from matplotlib.figure import Figure

    shares = _shares(parts)
    each = [_gradient(share, weight, loss) for share in shares]
    mean, whole = sum(each) / len(each), _gradient(SAMPLES, weight, loss)
    same = abs(mean - whole) < 1e-9
    lines = [f"w = {weight:g}, loss = {loss} of the squared errors"]
    labels = [f"rank {rank}, x = {' '.join(map(str, share))}" for rank, share in enumerate(shares)]
    lines += [f"{label}: gradient {_number(gradient)}" for label, gradient in zip(labels, each, strict=True)]
    lines += [
        f"mean of the ranks: {_number(mean)}, so a step goes to w = {weight - RATE * mean:.4g}",
        f"one process, all samples: {_number(whole)}, so a step goes to w = {weight - RATE * whole:.4g}",
        "The two steps are the same." if same else "The two steps differ.",
    ]

    names = [*(label.replace(", ", "\n") for label in labels), "mean of\nthe ranks", "one\nprocess"]
    colours = [*map(rank_colour, range(len(each))), "#3c3c3c", "#ffffff"]
    patterns = [*["//", "\\\\", "..", "xx"][: len(each)], "", ""]  # colour never says a rank alone
    figure = Figure(figsize=(1.2 * len(names) + 1.5, 3.2))
    ax = figure.subplots()
    bars = ax.bar(names, [*each, mean, whole], color=colours, hatch=patterns, edgecolor=["#ffffff"] * len(each) + ["#3c3c3c"] * 2, width=0.65)
    ax.bar_label(bars, [_number(g) for g in (*each, mean, whole)], padding=3)
    ax.axhline(0, color="#3c3c3c", linewidth=0.8)
    ax.axhline(whole, color="#3c3c3c", linewidth=0.8, linestyle=":")
    ax.margins(y=0.18)
    if not any((*each, whole)):
        ax.set_ylim(-1, 1)
    ax.set(ylabel="gradient of w", title="One process makes the same step" if same else "One process makes another step")
    ax.spines[["top", "right"]].set_visible(False)
    return "\n".join(lines), figure


def _shares(parts: str) -> list[tuple[int, ...]]:
    shares, start = [], 0
    for size in map(int, parts.split(" + ")):
        shares.append(SAMPLES[start : start + size])
        start += size
    return shares


def _gradient(samples: tuple[int, ...], weight: float, loss: str) -> float:
    """The derivative by w of the sum or mean of (w x - 2 x)²."""
    total = sum(2 * (weight - TARGET) * x * x for x in samples)
    return total / len(samples) if loss == "mean" else total


def _number(value: float) -> str:
    return f"{value:.4g}"
