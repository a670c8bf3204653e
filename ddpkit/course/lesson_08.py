"""Exercises of lesson 08: train on the digits."""

from __future__ import annotations

import hashlib
import itertools
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.course.exercise import Exercise, Mistake, Row, Seen

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset


def make_loader(rank: int, world_size: int, data: Dataset[Any], global_batch: int) -> DataLoader[Any]:
    """A loader for this rank: step by step, the ranks together see the batch of one process."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=global_batch // world_size, sampler=sampler)


def save(path: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write a checkpoint; `model` is the DDP wrapper, and `epoch` epochs are done."""
    import torch

    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


def load(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint into a model that is not wrapped yet; return the epoch to go on with."""
    import torch

    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


STEPS, EPOCHS, BREAK = 3, 4, 2


def _batches(random: random.Random, nprocs: int) -> list[tuple[Any, ...]]:
    global_batch = nprocs * random.randint(2, 3)
    return [(nprocs, random.sample(range(1000), STEPS * global_batch), global_batch)]


def _play_batches(rank: int, answer: Callable[..., Any], world_size: int, data: list[int], global_batch: int) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")  # an answer may leave rank and world size to the sampler. Not destroyed: a peer may still be connecting
    loader = answer(rank, world_size, data, global_batch)
    return loader if loader is ... else [batch.tolist() for batch in loader]


def _all(batches: Iterable[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


def _steps(seen: Seen) -> list[Row]:
    world_size, data, global_batch = seen.inputs
    rows = [Row("steps on each rank", [STEPS] * world_size, [len(batches) for batches in seen.values])]
    for step in range(STEPS):
        mine = [batches[step] if step < len(batches) else [] for batches in seen.values]
        whole = data[step * global_batch : (step + 1) * global_batch]
        counts = Row(f"step {step + 1}, images on each rank", [len(whole) // world_size] * world_size, [len(batch) for batch in mine])
        rows += [counts, Row(f"step {step + 1}, all ranks together", sorted(whole), _all(mine))]
    return rows


def _full_batches(seen: Seen) -> bool:
    return seen.nprocs > 1 and all(len(batches[0]) == seen.inputs[2] for batches in seen.values)


def _all_the_same(seen: Seen) -> bool:
    whole = sorted(seen.inputs[1])
    return seen.nprocs > 1 and all(_all(batches) == whole for batches in seen.values)


def _other_order(seen: Seen) -> bool:
    return _all(itertools.chain.from_iterable(seen.values)) == sorted(seen.inputs[1])


def _play_resume(rank: int, save: Callable[..., None], load: Callable[..., Any], seed: int) -> Any:
    """Train through, and train with a break in which everything is forgotten but the checkpoint."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: Iterable[int]) -> torch.nn.Module:
        wrapper = DistributedDataParallel(model)
        sampler: DistributedSampler[Any] = DistributedSampler(data, seed=seed)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(wrapper(x), y).backward()
                optimizer.step()
        return wrapper

    model, optimizer = build(seed)
    train(model, optimizer, range(EPOCHS))
    straight = _fingerprint(model.parameters())

    model, optimizer = build(seed)
    wrapper = train(model, optimizer, range(BREAK))
    saved = _fingerprint(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        # Each rank reads a copy of rank 0's file: where load fails in one, the folder is gone before the others have read it.
        path, content = Path(folder, "checkpoint.pt"), [b""]
        if rank == 0:
            save(str(path), wrapper, optimizer, BREAK)
            content = [path.read_bytes()]
        dist.broadcast_object_list(content)
        path.write_bytes(content[0])
        model, optimizer = build(seed + 1)
        start = load(str(path), model, optimizer)
    if start is ...:
        return ...
    loaded, momentum = _fingerprint(model.parameters()), bool(optimizer.state)
    train(model, optimizer, range(start if type(start) is int else 0, EPOCHS))
    resumed = _fingerprint(model.parameters())
    return [start, saved, loaded, straight, resumed, momentum]


def _fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Eight characters that differ where a single bit of the weights does."""
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:8]


def _ends(seen: Seen) -> list[Row]:
    rows = []
    for rank, (start, saved, loaded, straight, resumed, _) in enumerate(seen.values):
        rows += [
            Row(f"rank {rank}, epoch to go on with", BREAK, start),
            Row(f"rank {rank}, weights after loading", saved, loaded),
            Row(f"rank {rank}, weights at the end", straight, resumed),
        ]
    return rows


EXERCISES = (
    Exercise(
        id="08.batch",
        title="Match one process at equal global batch",
        solution=(make_loader,),
        hints=(
            "One step of all ranks together must see as many images as one step of one process: global_batch.",
            "DistributedSampler shares the images out; it needs shuffle=False here, so that the order is that of one process.",
            "DataLoader(data, batch_size=global_batch // world_size, sampler=…): the batch size of a loader is that of one rank.",
        ),
        shown="On 1, 2 and 4 real ranks, every step sees exactly the images of a step of one process, shared out equally.",
        world_sizes=(1, 2, 4),
        inputs=_batches,
        rows=_steps,
        play=_play_batches,
        mistakes=(
            Mistake(_all_the_same, "Every rank sees every image: nothing shares them out. DistributedSampler does, as the sampler of the loader."),
            Mistake(
                _full_batches,
                "Each rank takes a whole global batch, so a step sees world_size times too many images. batch_size is per rank: divide it.",
            ),
            Mistake(
                _other_order,
                "All images are there, in another order: something shuffles. DistributedSampler does unless it is told shuffle=False.",
            ),
        ),
    ),
    Exercise(
        id="08.resume",
        title="Resume, and end with the same weights",
        solution=(save, load),
        hints=(
            "Rank 0 alone calls save, with the wrapper; every rank calls load, with a new model that is not wrapped yet.",
            "The wrapper's model is model.module. Its state dict has the names that a model without a wrapper knows.",
            "Three things go on after the break: the weights, the optimizer's state (its momentum), and the number of the epoch. Save all three.",
        ),
        shown="On 2 real ranks, 2 epochs, a break and 2 more epochs end with the same weights as 4 epochs without a break, bit for bit.",
        world_sizes=(2,),
        inputs=lambda random, _nprocs: [(random.randrange(1 << 30),)],
        rows=_ends,
        play=_play_resume,
        failures=(
            (
                r"module\.",
                "The checkpoint is that of the wrapper: its names begin with module. and a model without a wrapper does not know them. "
                "Save model.module.state_dict().",
            ),
        ),
        mistakes=(
            Mistake(
                lambda seen: any(value[1] != value[2] for value in seen.values),
                "After load, the model does not have the weights that were saved.",
            ),
            Mistake(
                lambda seen: all(value[0] != BREAK for value in seen.values),
                f"Training goes on with the wrong epoch. Epochs 0 to {BREAK - 1} are done, so load must return the saved {BREAK}: "
                "the sampler's order depends on it, by set_epoch.",
            ),
            Mistake(
                lambda seen: not any(value[5] for value in seen.values),
                "The weights are back, and the optimizer begins anew: its momentum is lost. Its state dict belongs into the checkpoint too.",
            ),
        ),
    ),
)
