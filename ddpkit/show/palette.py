"""One look for all that the kit draws. Rank 2 has the same colour, and the same label, everywhere."""

from __future__ import annotations

# Okabe and Ito's colours for colour-blind eyes (https://jfly.uni-koeln.de/color/), darkened until white text on them has a contrast of at
# least 4.5:1; without the yellow, which cannot.
RANKS = ("#0072b2", "#a84f00", "#00795a", "#a3487f", "#3a6ea5", "#8a6200", "#5b5b5b")


def rank_colour(rank: int) -> str:
    """The colour of a rank, under white text or as a line. It repeats after seven: colour never says a rank alone."""
    return RANKS[rank % len(RANKS)]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as the WCAG defines it, 1 to 21 (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
