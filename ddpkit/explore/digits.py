"""Which digits does each rank see in a step? Dealt out by torch's own DistributedSampler."""

from __future__ import annotations

from typing import Any

from ddpkit.explore import explorer
from ddpkit.show.palette import rank_colour


def digits(dataset: Any, global_batch: int = 16, seed: int = 0) -> None:
    """Show the digits of one training step, a row for each rank; controls choose the ranks, the epoch and the step.

    Args:
        dataset: a `torchvision.datasets.MNIST`.
        global_batch: images in one step of all ranks together; a multiple of 4.
        seed: the seed of the DistributedSampler.

    Raises:
        ValueError: global_batch is not a positive multiple of 4.
    """
    if global_batch < 4 or global_batch % 4:
        raise ValueError(f"global_batch must be a multiple of 4, so that 1, 2 and 4 ranks can share it; it is {global_batch}.")

    def draw(ranks: int, epoch: int, step: int) -> tuple[str, Any]:
        from matplotlib.figure import Figure

        each = global_batch // ranks
        figure = Figure(figsize=(8, 0.62 * ranks))
        axes = figure.subplots(ranks, each, squeeze=False)
        lines = [f"epoch {epoch}, step {step}, {ranks} rank{'s' * (ranks > 1)}"]
        for rank, row in enumerate(axes):
            mine = _dealt(dataset, ranks, rank, epoch, seed)[step * each : (step + 1) * each]
            lines.append(f"rank {rank} sees {' '.join(str(int(dataset.targets[i])) for i in mine)}")
            for ax, index in zip(row, mine, strict=True):
                ax.imshow(dataset.data[index], cmap="gray_r")
                ax.set(xticks=[], yticks=[])
                for spine in ax.spines.values():
                    spine.set_color(rank_colour(rank))
            row[0].set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", color=rank_colour(rank))
        return "\n".join(lines), figure

    def controls() -> dict[str, Any]:
        import ipywidgets as widgets

        steps = len(dataset) // global_batch
        return {
            "ranks": widgets.ToggleButtons(options=[1, 2, 4], value=2, description="ranks"),
            "epoch": widgets.IntSlider(0, 0, 5, description="epoch"),
            "step": widgets.IntSlider(0, 0, steps - 1, description="step"),
        }

    explorer.show(controls, {"ranks": 2, "epoch": 0, "step": 0}, draw)


def _dealt(dataset: Any, ranks: int, rank: int, epoch: int, seed: int) -> list[int]:
    from torch.utils.data import DistributedSampler

    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)
