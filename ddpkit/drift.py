"""The parameters of DDP models, compared between ranks at the end of a run.

DistributedDataParallel makes them equal when it wraps a model, and equal gradients keep them equal. Where they differ in the end, a step went
past the wrapper, and each rank has trained a model of its own. Nothing fails when that happens, so somebody has to look.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import wraps
from typing import Any

from ddpkit.messages import Weights

TOLERANCE = 1e-6
"""Relative difference of norms up to which parameters with unlike bits count as equal: cores of unlike kinds may round differently."""


KEEP = 256 << 20
"""Bytes of parameters that are kept alive for this look. Older models are looked at where somebody else keeps them; the newest always is."""


class Models:
    """The DDP models of this rank."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], list[int]]] = []
        self._kept: list[Any] = []
        """The newest ones, kept alive: a function's models are gone when the function returns, before anybody could look at them."""

    def attach(self) -> None:
        """Notice the models that are wrapped from now on."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        original = DistributedDataParallel.__init__

        @wraps(original)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            self._made.append((weakref.ref(this), dist.get_process_group_ranks(this.process_group)))
            self._kept.append(this)
            while len(self._kept) > 1 and sum(map(_size, self._kept)) > KEEP:
                del self._kept[0]

        DistributedDataParallel.__init__ = init  # type: ignore[assignment, method-assign]

    def weights(self, rank: int) -> Weights:
        """What is needed to compare them with other ranks': a few numbers for each parameter."""
        models = []
        for number, (reference, ranks) in enumerate(self._made):
            model = reference()
            if model is None:
                continue
            try:
                parameters = _parameters(model)
            except Exception:  # a kind of parameter that nobody foresaw: this look is not worth a failure of the run
                continue
            models.append({"number": number, "ranks": ranks, "name": type(model.module).__name__, "parameters": parameters})
        return Weights(rank, models)


def _size(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _parameters(model: Any) -> dict[str, list[float]]:
    """By name: the sum of all bits (as whole numbers), the norm, and the mean."""
    import torch

    parameters: dict[str, list[float]] = {}
    for name, parameter in model.module.named_parameters():
        if name in model.parameters_to_ignore or parameter.is_meta or not parameter.numel():
            continue
        values = parameter.detach().contiguous()
        if values.is_complex():
            values = torch.view_as_real(values)
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        bits = int(values.view(whole).sum(dtype=torch.int64))
        exact = values.double() if values.is_floating_point() else values.to(torch.float64)
        parameters[name] = [bits, float(exact.norm()), float(exact.mean())]
    return parameters


def difference(weights: Mapping[int, Weights]) -> str:
    """The first parameter in which ranks' copies of one DDP model differ, in words; empty where there is none."""
    for rank, mine in sorted(weights.items()):
        for model in mine.models:
            for other, yours in sorted(weights.items()):
                twin = next((m for m in yours.models if (m["number"], m["ranks"]) == (model["number"], model["ranks"])), None)
                if other <= rank or twin is None or twin["parameters"].keys() != model["parameters"].keys():
                    continue
                unlike = [name for name, numbers in model["parameters"].items() if not _same(numbers, twin["parameters"][name])]
                if unlike:
                    first, last = ("norm", 1) if not _close(model["parameters"][unlike[0]][1], twin["parameters"][unlike[0]][1]) else ("mean", 2)
                    here, there = (m["parameters"][unlike[0]][last] for m in (model, twin))
                    return (
                        f"{model['name']}: {unlike[0]} has the {first} {here:.6g} in rank {rank} and {there:.6g} in rank {other} "
                        f"({len(unlike)} of {len(model['parameters'])} parameters differ)"
                    )
    return ""


def _same(mine: list[float], yours: list[float]) -> bool:
    return mine[0] == yours[0] or all(_close(a, b) for a, b in zip(mine[1:], yours[1:], strict=True))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b))
