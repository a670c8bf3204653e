"""The MNIST lesson's training as a script: `torchrun --nproc-per-node 2 lesson.py ROOT OUT`, or `ddpkit.spawn(train, (ROOT, OUT), 2)`.

Nothing in it belongs to a launcher. Each rank writes the moments of its steps, and the
processor time of its epochs, into a file.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

EPOCHS = 3
BATCH = 64


def train(rank: int, root: str, out: str) -> None:
    """Train a linear model for three epochs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = datasets.MNIST(root, train=True, transform=transforms.ToTensor())
    sampler: DistributedSampler[object] = DistributedSampler(digits, seed=0)
    loader = DataLoader(digits, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs, losses, cpu = [], [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        dist.barrier()
        used, moments = time.process_time(), [time.monotonic()]
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            moments.append(time.monotonic())
            if step % 20 == 0:
                print(f"epoch {epoch} step {step:3} loss {loss.item():.4f}")
                losses.append(loss.item())
        epochs.append(moments)
        cpu.append(time.process_time() - used)
    with open(os.path.join(out, f"{rank}.json"), "w") as file:
        json.dump({"epochs": epochs, "losses": losses, "cpu": cpu, "threads": torch.get_num_threads()}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(os.environ["RANK"]), sys.argv[1], sys.argv[2])
