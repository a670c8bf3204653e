"""`log`: numbers from a rank to whoever watches."""

from __future__ import annotations

import os
from typing import Any


def log(**numbers: Any) -> None:
    """Report numbers from a rank: `ddpkit.log(step=3, loss=loss)`.

    Under `ddpkit.spawn` they go to the notebook, into `run.metrics[rank]`, one dict a call. Anywhere else (a script under torchrun, plain
    Python) they are printed as one line, so the same function runs there unchanged.

    Args:
        numbers: int, float, bool, str or None by name; a tensor of one element, on any device, counts as its number.

    Raises:
        TypeError: something else was given; the message names it.
    """
    from ddpkit import rank

    plain = {name: _plain(name, value) for name, value in numbers.items()}
    if rank.current is not None:
        rank.current.log(plain)
        return
    where = f"rank {os.environ['RANK']} │ " if "RANK" in os.environ else ""
    print(where + "  ".join(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in plain.items()), flush=True)


def _plain(name: str, value: Any) -> float | int | str | bool | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (getattr(value, "numel", None) is not None and value.numel() == 1) or getattr(value, "size", None) == 1:
        return value.item()  # type: ignore[no-any-return]
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(f"ddpkit.log takes numbers, and {name} is a {type(value).__name__}{shape}: give one number, such as {name}.mean().")
