"""The handle of a tensor needs its maker alive, thousands of them use up open files, and a loss with its graph is refused.

pytorch/pytorch#60654, pytorch/pytorch#973
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import program, settle


@pytest.mark.usefixtures("nothing_left")
def test_tensors_outlive_their_ranks_and_belong_to_the_notebook(start_method):
    def one(rank):
        import torch

        return torch.full((3,), float(rank))

    a, b = ddpkit.spawn(one, start_method=start_method, view=False)
    assert settle() == []
    assert a.tolist() == [0.0] * 3 and b.tolist() == [1.0] * 3
    a += 5
    assert a.tolist() == [5.0] * 3 and b.tolist() == [1.0] * 3
    assert not a.is_shared() and not b.is_shared()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_two_thousand_tensors_under_a_limit_of_256_open_files(tmp_path, method):
    pytest.importorskip("resource", reason="limits of open files: not on this platform")
    done = program(
        tmp_path,
        """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import ddpkit

def many(rank, given):
    import torch
    return [torch.tensor([float(i)]) for i in range(len(given))]

import torch
got = ddpkit.spawn(many, ([torch.zeros(1) for _ in range(2000)],), start_method=sys.argv[1]).values
print([len(tensors) for tensors in got], got[1][1999].item())
""",
        method,
    )
    assert (done.stdout, done.stderr) == ("[2000, 2000] 1999.0\n", "")


@pytest.mark.usefixtures("nothing_left")
def test_a_loss_with_its_graph():
    def loss_itself(rank):
        import torch

        return (torch.ones(1, requires_grad=True) * 3).sum()  # forgot .item()

    assert [loss.item() for loss in ddpkit.spawn(loss_itself, view=False)] == [3.0, 3.0]
