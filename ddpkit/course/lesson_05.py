"""Exercises of lesson 05: data parallel by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpkit.course.exercise import Exercise, Mistake, Row, Seen

if TYPE_CHECKING:
    import torch


def average_gradients(model: torch.nn.Module) -> None:
    """Between backward and step, on every rank: make each gradient the mean over the ranks."""
    import torch.distributed as dist

    for parameter in model.parameters():  # a tied parameter comes once
        if parameter.grad is not None:  # a frozen one has none
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def fair_loss(losses: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient, averaged over the ranks, is that of the mean over all samples."""
    import torch
    import torch.distributed as dist

    count = torch.tensor(float(len(losses)))
    dist.all_reduce(count)
    return losses.sum() * dist.get_world_size() / count


def _tied_and_frozen() -> Any:
    """A model with whole numbers for weights: whatever the order of adding, its gradients are exact."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, dtype=torch.float64)
            self.frozen = nn.Linear(2, 2, dtype=torch.float64)
            self.tied = nn.Linear(2, 2, dtype=torch.float64)
            self.tied.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.tied(self.frozen(self.first(x)))
            return result

    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(1, 4, parameter.shape))
    return model


EACH = 2
"""Samples on each rank; with 1, 2 and 4 ranks all means are exact."""


def _play_average(rank: int, answer: Callable[..., Any], seed: int) -> Any:
    """What the gradients are in the end, those of one process, and those of this rank alone; and whether the weights are untouched."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = _tied_and_frozen()
    data = torch.randint(1, 6, (EACH * dist.get_world_size(), 2)).double()

    def gradients(part: torch.Tensor) -> list[list[float] | None]:
        model.zero_grad()
        model(part).square().mean().backward()
        return now()

    def now() -> list[list[float] | None]:
        return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]

    before = [p.detach().clone() for p in model.parameters()]
    names = [name.replace("first.weight", "first.weight (tied)") for name, _ in model.named_parameters()]
    whole, mine = gradients(data), gradients(data[rank * EACH : (rank + 1) * EACH])
    answered = answer(model)
    untouched = all(map(torch.equal, before, model.parameters()))
    return ... if answered is ... else [names, whole, mine, now(), untouched]


def _averages(seen: Seen) -> list[Row]:
    rows = []
    for rank, (names, whole, _, got, untouched) in enumerate(seen.values):
        rows.append(Row(f"rank {rank}, weights untouched", True, untouched))
        rows += [Row(f"rank {rank}, gradient of {name}", expected, is_) for name, expected, is_ in zip(names, whole, got, strict=True)]
    return sorted(rows, key=lambda row: row.same)  # only some are shown: first those that differ


def _times(gradients: list[list[float] | None], factor: float) -> list[list[float] | None]:
    return [gradient and [factor * value for value in gradient] for gradient in gradients]


def _each(seen: Seen, looks: Callable[[Any, Any, Any], bool]) -> bool:
    """Whether it looks so on every rank: whole, mine, got."""
    return seen.nprocs > 1 and all(looks(whole, mine, got) for _, whole, mine, got, _ in seen.values)


def _only_rank_0(seen: Seen) -> bool:
    return seen.nprocs > 1 and [got == whole for _, whole, _, got, _ in seen.values] == [rank == 0 for rank in range(seen.nprocs)]


def _zeros_for_frozen(seen: Seen) -> bool:
    return all(is_ is not None for value in seen.values for is_ in value[3])


def _parts(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    """Parts of unlike sizes, in which the mean of means is not the mean; then parts of which the last, where there are several, is empty."""
    if nprocs == 1:
        return [([[random.randint(1, 9) for _ in range(random.randint(2, 6))]],)]
    while True:
        parts = [[random.randint(1, 9) for _ in range(size)] for size in random.sample(range(1, 7), nprocs)]
        if not _near(_mean_of_all(_per_sample(parts)), _mean_of_means(_per_sample(parts))):
            return [(parts,), ([*parts[:-1], []],)]


def _play_fair(rank: int, answer: Callable[..., Any], parts: list[list[int]]) -> Any:
    """The gradient of w in y = w x with target 2 x and w = 1, averaged over the ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    w = torch.tensor(1.0, requires_grad=True)
    x = torch.tensor(parts[rank], dtype=torch.float32)
    loss = answer((w * x - 2 * x).square())
    if loss is ... or loss is None:
        return loss
    loss.backward()
    assert w.grad is not None  # it has a value, since backward has not raised
    dist.all_reduce(w.grad)
    return round(w.grad.item() / dist.get_world_size(), 2)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _per_sample(parts: list[list[int]]) -> list[list[float]]:
    """The gradient that each sample has."""
    return [[-2.0 * x * x for x in part] for part in parts]


def _mean_of_all(parts: list[list[float]]) -> float:
    return _mean([gradient for part in parts for gradient in part])


def _mean_of_means(parts: list[list[float]]) -> float:
    return _mean([_mean(part) for part in parts if part])


def _mean_of_sums(parts: list[list[float]]) -> float:
    return _mean([sum(part) for part in parts])


def _fair(seen: Seen) -> list[Row]:
    (parts,) = seen.inputs
    whole = round(_mean_of_all(_per_sample(parts)), 2)
    return [
        Row(f"rank {rank}, averaged gradient (parts of {' and '.join(str(len(part)) for part in parts)})", whole, whole if _near(whole, got) else got)
        for rank, got in enumerate(seen.values)
    ]


def _near(expected: float, got: Any) -> bool:
    """To within the rounding of float32 numbers and of what is shown."""
    return type(got) is float and abs(expected - got) <= 0.01 + 1e-4 * abs(expected)


def _is_on_all(seen: Seen, of: Callable[[list[list[float]]], float]) -> bool:
    return all(_near(of(_per_sample(*seen.inputs)), value) for value in seen.values)


EXERCISES = (
    Exercise(
        id="05.average",
        title="Average the gradients, tied and frozen parameters too",
        solution=(average_gradients,),
        hints=(
            "model.parameters() gives every parameter once, a tied one too. Which of them have a gradient at all after backward?",
            "The gradient of a frozen parameter is None. Leave it so: skip it, on all ranks alike.",
            "For the others: dist.all_reduce(parameter.grad) adds up in place, then parameter.grad /= dist.get_world_size().",
        ),
        shown="On 1, 2 and 4 real ranks, every gradient is bit for bit that of one process with the whole batch, and what is frozen stays so.",
        world_sizes=(1, 2, 4),
        inputs=lambda random, _nprocs: [(random.randrange(1 << 30),)],
        rows=_averages,
        play=_play_average,
        failures=(
            ("NoneType", "A frozen parameter has no gradient: after backward its grad is None. Skip it, on all ranks alike."),
            (
                r"name '(rank|world_size)' is not defined",
                "The names of the %%ranks cells live in those ranks only. In this function, ask dist.get_rank() and dist.get_world_size().",
            ),
        ),
        mistakes=(
            Mistake(
                lambda seen: not all(value[4] for value in seen.values),
                "This changes the weights. Only the gradients are averaged; the optimizer changes the weights afterwards.",
            ),
            Mistake(
                _zeros_for_frozen,
                "The frozen parameter has a gradient now. An optimizer with weight decay or momentum would move it: leave None where None is.",
            ),
            Mistake(
                lambda seen: _each(seen, lambda _whole, mine, got: got == mine),
                "The gradients are still those of each rank. The mean must end up in parameter.grad itself, in place: "
                "grad = grad / n only gives a name to a new tensor.",
            ),
            Mistake(_only_rank_0, "Rank 0 has the mean and the others do not: reduce leaves the result on one rank. all_reduce leaves it on all."),
            Mistake(
                lambda seen: _each(seen, lambda whole, _mine, got: got == _times(whole, seen.nprocs)),
                "These are the sums over the ranks. all_reduce adds up; to have the mean, divide by the number of ranks.",
            ),
            Mistake(
                lambda seen: _each(seen, lambda _whole, mine, got: got == _times(mine, 1 / seen.nprocs)),
                "Each rank has divided its own gradient, and nothing was added up. all_reduce does that.",
            ),
        ),
    ),
    Exercise(
        id="05.unequal",
        title="The right loss for unequal parts",
        solution=(fair_loss,),
        hints=(
            "Each sample must count alike. In the mean of a small part, a sample counts more than in the mean of a large one.",
            "One process divides the sum of all losses by the number of all samples. A rank knows its len(losses); an all_reduce tells the total.",
            "Averaging divides by the world size, which one process never does. So: losses.sum() * dist.get_world_size() / total.",
        ),
        shown="On 1, 2 and 3 real ranks with parts of any size, even an empty one, the averaged gradient is that of one process.",
        world_sizes=(1, 2, 3),
        inputs=_parts,
        rows=_fair,
        play=_play_fair,
        failures=(
            (
                r"has no attribute 'backward'|does not require grad",
                "What comes back must still know how it was computed: no .item(), no .detach(), no new tensor around the loss.",
            ),
        ),
        mistakes=(
            Mistake(lambda seen: all(value is None for value in seen.values), "This returns nothing. Return the loss, a tensor with one number."),
            Mistake(
                lambda seen: _is_on_all(seen, _mean_of_sums),
                "This is the sum over the part. It is divided by the number of ranks later, and never by the number of samples.",
            ),
            Mistake(
                lambda seen: seen.nprocs > 1 and _is_on_all(seen, lambda parts: _mean_of_sums(parts) / sum(map(len, parts))),
                "Divided by the world size once too often: averaging the gradients divides already. Multiply the loss by the world size.",
            ),
            Mistake(
                lambda seen: seen.nprocs > 1 and _is_on_all(seen, _mean_of_means),
                "This is the mean of each part, and the mean of means is not the mean: samples of a small part count more.",
            ),
        ),
    ),
)
