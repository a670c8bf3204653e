"""Exercises of lesson 09: broken programs to mend. The check makes the process group, so an answer is the program without that line."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddpkit.course.exercise import Exercise, Mistake, Row, Seen

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

STILL_WAITS = r"RanksStuck|waits? for ever|waited longer than the timeout"
UNLIKE = r"preamble|unlike tensors|invalid tensor size|disagree about a collective|Detected mismatch"
DRIFTED = r"drifted apart"


def mean(rank: int, part: list[float]) -> float:
    """The mean of the values of all ranks; this rank's part may be empty."""
    import torch
    import torch.distributed as dist

    both = torch.tensor([sum(part), len(part)], dtype=torch.float32)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def report(rank: int, loss: torch.Tensor) -> float | None:
    """The mean of the ranks' losses, on rank 0; None on the others."""
    import torch.distributed as dist

    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size() if rank == 0 else None


def train(rank: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    """Train on this rank's batches, of which other ranks may have more or fewer."""
    with model.join():
        for batch in batches:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()


def collect(rank: int, scores: torch.Tensor) -> torch.Tensor:
    """The scores of all ranks in one tensor, rank 0's first; each rank may have another number of them."""
    import torch
    import torch.distributed as dist

    ranks = range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(scores)]))
    longest = int(max(sizes))
    parts = [torch.zeros(longest) for _ in ranks]
    dist.all_gather(parts, torch.nn.functional.pad(scores, (0, longest - len(scores))))
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def totals(rank: int, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each metric, added up over the ranks, whatever the order of the dict in each."""
    import torch.distributed as dist

    for name in sorted(metrics):
        dist.all_reduce(metrics[name])
    return metrics


def wrap(model: torch.nn.Module) -> DistributedDataParallel:
    """A DDP wrapper for a model of which each step uses a part."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, find_unused_parameters=True)


LR, STEPS = 0.125, 3


def _group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def _quarters(random: random.Random, count: int) -> list[float]:
    """Numbers that add up without rounding, none of them 0."""
    return [random.randint(1, 40) / 4 for _ in range(count)]


def _round(value: Any) -> Any:
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


# 09.empty


def _parts(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    """Unlike numbers of values, the last rank with none."""
    parts = [_quarters(random, nprocs - rank - 1) for rank in range(nprocs)]
    parts[0][0] += 50.0  # so that the mean of means is another number
    return [(parts,)]


def _play_mean(rank: int, answer: Callable[..., Any], parts: list[list[float]]) -> Any:
    _group()
    return answer(rank, parts[rank])


def _means(seen: Seen) -> list[Row]:
    values = [value for part in seen.inputs[0] for value in part]
    return [Row(f"rank {rank} returns", round(sum(values) / len(values), 4), _round(value)) for rank, value in enumerate(seen.values)]


def _mean_of_means(seen: Seen) -> bool:
    means = [sum(part) / len(part) if part else 0.0 for part in seen.inputs[0]]
    by = (len(means), len([part for part in seen.inputs[0] if part]))
    return any(all(_round(value) == round(sum(means) / n, 4) for value in seen.values) for n in by)


# 09.alone


def _play_report(rank: int, answer: Callable[..., Any], losses: list[float]) -> Any:
    import torch

    _group()
    return answer(rank, torch.tensor(losses[rank]))


def _reports(seen: Seen) -> list[Row]:
    rows = [Row("rank 0 returns", round(sum(seen.inputs[0]) / seen.nprocs, 4), _round(seen.values[0]))]
    return rows + [Row(f"rank {rank} returns", None, value) for rank, value in enumerate(seen.values) if rank]


# 09.uneven


def _lengths(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    least = random.randint(2, 3)
    batches = [_quarters(random, least + 2 * ((rank + 1) % nprocs)) for rank in range(nprocs)]
    return [(least, batches)]


def _play_train(rank: int, answer: Callable[..., Any], least: int, batches: list[list[float]]) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _group()
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    done = answer(rank, model, optimizer, [torch.tensor([[x]]) for x in batches[rank]])
    return done if done is ... else [len(steps), model.module.weight.item()]


def _trained(seen: Seen) -> list[Row]:
    least = seen.inputs[0]
    rows = []
    for rank, (steps, weight) in enumerate(seen.values):
        rows.append(Row(f"rank {rank}, steps", f"{least} or more", f"{least} or more" if steps >= least else str(steps)))
        if rank:
            rows.append(Row(f"rank {rank}, weight at the end, as on rank 0", seen.values[0][1], weight))
    return rows


# 09.gather


def _play_collect(rank: int, answer: Callable[..., Any], parts: list[list[float]]) -> Any:
    import torch

    _group()
    return answer(rank, torch.tensor(parts[rank]))


def _unlike_parts(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    sizes = random.sample(range(1, 6), nprocs)
    return [([_quarters(random, size) for size in sizes],)]


def _collected(seen: Seen) -> list[Row]:
    whole = [value for part in seen.inputs[0] for value in part]
    return [Row(f"rank {rank} returns", whole, value) for rank, value in enumerate(seen.values)]


def _flat(value: Any) -> Iterator[Any]:
    for item in value if isinstance(value, list) else [value]:
        yield from _flat(item) if isinstance(item, list) else [item]


def _padded(seen: Seen) -> bool:
    whole = [value for part in seen.inputs[0] for value in part]
    return all(isinstance(value, list) and 0.0 in _flat(value) and [v for v in _flat(value) if v] == whole for value in seen.values)


def _cut(seen: Seen) -> bool:
    shortest = min(len(part) for part in seen.inputs[0])
    return all(value == [v for part in seen.inputs[0] for v in part[:shortest]] for value in seen.values)


# 09.order


def _orders(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    """The same names in each rank, in another order."""
    names = random.sample(["loss", "hits", "steps", "tokens"], 4)
    return [([dict(zip(names[rank:] + names[:rank], _quarters(random, 4), strict=True)) for rank in range(nprocs)],)]


def _play_totals(rank: int, answer: Callable[..., Any], numbers: list[dict[str, float]]) -> Any:
    import torch

    _group()
    found = answer(rank, {name: torch.tensor([number]) for name, number in numbers[rank].items()})
    return [[name, float(value) if hasattr(value, "__float__") else value] for name, value in found.items()] if isinstance(found, dict) else found


def _named(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value) else {}


def _sums(seen: Seen) -> list[Row]:
    numbers = seen.inputs[0]
    return [
        Row(f"rank {rank}, {name}", sum(one[name] for one in numbers), _named(value).get(name))
        for rank, value in enumerate(seen.values)
        for name in sorted(numbers[0])
    ]


def _swapped(seen: Seen) -> bool:
    """Whether each rank went through its dict in its own order, so that the first met the first."""
    sums = [sum(values) for values in zip(*(one.values() for one in seen.inputs[0]), strict=True)]
    return all(_named(value) == dict(zip(one, sums, strict=True)) for one, value in zip(seen.inputs[0], seen.values, strict=True))


# 09.unused


def _play_wrap(rank: int, answer: Callable[..., Any], inputs: list[float]) -> Any:
    """Three steps of a model with two heads: even ranks use one, odd ranks the other."""
    import torch

    class TwoHeads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
            for parameter in self.parameters():
                torch.nn.init.zeros_(parameter)

        def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
            return self.heads[head](x)  # type: ignore[no-any-return]

    _group()
    model = answer(TwoHeads())
    if model is ... or not isinstance(model, torch.nn.Module):
        return model
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([[inputs[rank]]]), rank % 2).mean().backward()
        optimizer.step()
    return [parameter.item() for parameter in model.parameters()]


def _heads(seen: Seen) -> list[Row]:
    """DDP divides by all ranks, those that did not use the head too."""
    both = [round(-LR * STEPS * sum(seen.inputs[0][head::2]) / seen.nprocs, 4) for head in range(2)]
    return [Row(f"rank {rank}, weights of the two heads", both, _round(value)) for rank, value in enumerate(seen.values)]


def _each_alone(seen: Seen) -> bool:
    """Whether each rank has trained its own head, and by its own data only."""
    own = [[round(-LR * STEPS * x, 4) if rank % 2 == head else 0.0 for head in range(2)] for rank, x in enumerate(seen.inputs[0])]
    return all(_round(value) == alone for value, alone in zip(seen.values, own, strict=True))


EXERCISES = (
    Exercise(
        id="09.empty",
        title="The mean, where a rank has no values",
        solution=(mean,),
        hints=(
            "A rank without values has no mean. It has a sum, and a count.",
            "Let every rank give two numbers to one all_reduce: its sum and its count. Divide after that, when both are those of all ranks.",
            "torch.tensor([sum(part), len(part)], dtype=torch.float32): of an empty part, without dtype, it would be whole numbers (int64).",
        ),
        shown="On 2 and 3 real ranks, the last of them without values, every rank has the mean of all values.",
        world_sizes=(2, 3),
        inputs=_parts,
        rows=_means,
        play=_play_mean,
        failures=(
            (r"ZeroDivisionError", "The rank without values still divides by the number of its values, which is 0."),
            (STILL_WAITS, "A rank leaves before the collective, perhaps because it has no values. It must call it all the same, with 0 and 0."),
            (
                UNLIKE,
                "The ranks give unlike tensors. torch.tensor([sum([]), len([])]) is of whole numbers (int64), the others are float32: say dtype.",
            ),
        ),
        mistakes=(Mistake(_mean_of_means, "This is a mean of means. The parts have unlike sizes, so add up sums and counts, and divide once."),),
    ),
    Exercise(
        id="09.alone",
        title="Every rank takes part, rank 0 reports",
        solution=(report,),
        hints=(
            "Only one thing is for rank 0 alone. It is not the all_reduce.",
            "Call the collective first, in every rank; put under if rank == 0 only what is done with the result.",
            "all_reduce leaves the sum. The mean is that divided by dist.get_world_size().",
        ),
        shown="On 1, 2 and 3 real ranks, rank 0 has the mean of all losses, and no rank waits.",
        world_sizes=(1, 2, 3),
        inputs=lambda random, nprocs: [(_quarters(random, nprocs),)],
        rows=_reports,
        play=_play_report,
        failures=((STILL_WAITS, "A collective is still where not every rank comes by: under if rank == 0, or after a return."),),
        mistakes=(
            Mistake(
                lambda seen: seen.nprocs > 1 and _round(seen.values[0]) == round(sum(seen.inputs[0]), 4),
                "This is the sum. For the mean, divide it by the world size.",
            ),
            Mistake(
                lambda seen: seen.nprocs > 1 and all(value == seen.values[0] for value in seen.values),
                "Every rank reports. Calling the collective is for all, reporting for rank 0 only: the others return None.",
            ),
        ),
    ),
    Exercise(
        id="09.uneven",
        title="Loops of unlike length",
        solution=(train,),
        hints=(
            "Every backward of a DDP model is a collective. So all ranks must make equally many, or DDP must be told that some end early.",
            "Two cures: with model.join(): around the loop lets ranks that are done answer for those that are not; or find the smallest number of "
            "batches, and let every rank make that many.",
            "The smallest: n = torch.tensor(len(batches)), then dist.all_reduce(n, op=dist.ReduceOp.MIN), then batches[:n].",
        ),
        shown="On 2 and 3 real ranks with unlike numbers of batches, nobody waits, and all ranks end with the same weight.",
        world_sizes=(2, 3),
        inputs=_lengths,
        rows=_trained,
        play=_play_train,
        failures=(
            (STILL_WAITS, "The rank with more batches still waits for the others, which are done: every backward of a DDP model needs all ranks."),
            (DRIFTED, "Nobody waits, and each rank has trained a model of its own: steps went past the wrapper. Call model(batch) in all of them."),
        ),
        mistakes=(
            Mistake(
                lambda seen: any(steps < seen.inputs[0] for steps, _ in seen.values),
                "Too few steps: every rank has at least the batches that the shortest has, so all of these can be used.",
            ),
        ),
    ),
    Exercise(
        id="09.gather",
        title="Gather parts of unlike sizes",
        solution=(collect,),
        hints=(
            "all_gather wants tensors of one size. First tell each other the sizes; those are one number in each rank, so they have one size.",
            "Fill each part up with zeros to the longest, gather these, and cut each part back to its own size.",
            "torch.nn.functional.pad(scores, (0, longest - len(scores))) fills up. Shorter, and slower for large tensors: dist.all_gather_object.",
        ),
        shown="On 2 and 3 real ranks with unlike numbers of scores, every rank has all of them, in order.",
        world_sizes=(2, 3),
        inputs=_unlike_parts,
        rows=_collected,
        play=_play_collect,
        failures=((UNLIKE, "The ranks still give tensors of unlike sizes to one all_gather."),),
        mistakes=(
            Mistake(_padded, "The zeros that filled the parts up are still in the result. Cut each part back to its own size."),
            Mistake(_cut, "Every part is cut to the shortest, so scores are lost. Fill up to the longest instead."),
        ),
    ),
    Exercise(
        id="09.order",
        title="One order for all ranks",
        solution=(totals,),
        hints=(
            "A collective does not know names. The first call of one rank meets the first call of the others.",
            "A dict has the order in which it was filled, and that may differ from rank to rank. Choose an order that does not.",
            "for name in sorted(metrics): all_reduce metrics[name]; then return the dict.",
        ),
        shown="On 2 and 3 real ranks, whose dicts have unlike orders, each metric has been added to itself.",
        world_sizes=(2, 3),
        inputs=_orders,
        rows=_sums,
        play=_play_totals,
        mistakes=(
            Mistake(_swapped, "Numbers are added to others of another name: each rank goes through its dict in its own order. Nothing complains."),
            Mistake(lambda seen: all(value is None for value in seen.values), "This returns nothing. Return the dict."),
        ),
    ),
    Exercise(
        id="09.unused",
        title="A model of which each step uses a part",
        solution=(wrap,),
        hints=(
            "DDP counts on a gradient for every parameter in every step. Here each rank uses one of two heads, so the layers cannot be taken out.",
            "DDP can look, after each forward, which parameters took part. It is an argument of DistributedDataParallel.",
            "DDP(model, find_unused_parameters=True)",
        ),
        shown="On 2 and 3 real ranks that use different heads, both heads are trained, and every rank has the same weights.",
        world_sizes=(2, 3),
        inputs=lambda random, nprocs: [(_quarters(random, nprocs),)],
        rows=_heads,
        play=_play_wrap,
        failures=(
            (r"Expected to have finished reduction", "DDP still waits for gradients of parameters that took no part in the loss."),
            (DRIFTED, "This gives back the model inside the wrapper, so nothing averages the gradients. Return the wrapper."),
        ),
        mistakes=(Mistake(_each_alone, "Each rank trains a model of its own: it is not wrapped, so nothing averages the gradients."),),
    ),
)
