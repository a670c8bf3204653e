"""Tensors of unlike shape in one collective: it hangs, ends the process with a byte count, or gives wrong results.

NVIDIA/nccl#1394, pytorch/pytorch#85234
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


def reduce_unlike(rank):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(3 + 5 * rank))  # the call


def gather_unlike(rank):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine = torch.zeros(3 + 5 * rank)
    dist.all_gather([torch.zeros_like(mine) for _ in range(2)], mine)  # the call


@pytest.mark.parametrize("fn", [reduce_unlike, gather_unlike])
def test_an_abort_is_explained(fn):
    error = fails(ddpkit.RankDied, fn, within=45)
    says(error, "rank 0 of 2 died: ", "SIGABRT", f"in {fn.__name__}\n", "# the call", "(float32 [3], number 1 of the default group)")
    says(error, "unlike shape", "make shape and dtype equal in all ranks")
    if fn is reduce_unlike:  # in all_gather, rank 1 may have got all that it waits for, and returned
        says(error, "Follow-on", "rank 1's last collective was all_reduce (float32 [8], number 1 of the default group)")


def test_sizes_that_gloo_does_not_notice():
    def broadcast_unlike(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.broadcast(torch.zeros(3 + 5 * rank), 0)  # rank 1 waits for no more than it gets

    error = fails(ddpkit.RanksDisagree, broadcast_unlike)
    says(error, "rank 0 called broadcast (float32 [3]", "rank 1 called broadcast (float32 [8]", "tensors of equal size and dtype")


def test_models_of_unlike_size():
    def model_unlike(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2 + rank))  # the call

    error = fails(ddpkit.RankFailed, model_unlike, within=45)
    says(
        error,
        "rank 1 of 2 failed: RuntimeError: ",
        "[3, 2]",
        "appears not to match sizes of the same param in process 0",
        "in model_unlike\n",
        "# the call",
    )
    says(error, "the ranks wrapped models of unlike shape", "build the same model in every rank")
