"""Ranks whose copies of one DDP model are unlike at the end of a run are noticed; whatever may rightly be unlike is not."""

from __future__ import annotations

import pytest

import ddpkit
from ddpkit.drift import difference
from ddpkit.messages import Weights

pytestmark = pytest.mark.usefixtures("nothing_left")


def train(rank, kind):
    """Two steps of a small model under DDP, in the way of `kind`."""
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.manual_seed(rank)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
            self.norm = torch.nn.BatchNorm1d(4)
            self.empty = torch.nn.Parameter(torch.ones(0), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x):
            return self.last(self.norm(self.first(x))) * self.scale

    def steps(model, optimizer, count=2):
        for _ in range(count):
            optimizer.zero_grad()
            forward = model.module if kind == "past the wrapper" else model
            with model.no_sync() if kind == "no_sync" else contextlib.nullcontext():
                forward(torch.randn(4, 4)).pow(2).mean().backward()
            optimizer.step()

    models = [DDP(Net()) for _ in range(2 if kind == "two models" else 1)]
    for model in models:
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        if kind == "changed by hand":
            models[0].module.last.bias += rank
        if kind == "one bit":  # as if processors of unlike kinds had rounded
            weight = models[0].module.last.weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(float(rank)))
        if kind == "negated":
            models[0].module.last.weight *= -1 if rank else 1
        if kind == "not a number":
            models[0].module.last.weight[0, 0] = float("nan")
    if kind == "half precision":
        models[0].module.half()
    if kind == "the older one drifts":
        DDP(Net())
        models[0].module.last.bias.data += rank
    return rank


@pytest.mark.parametrize("kind", ["plain", "two models", "one bit", "not a number", "half precision"])
def test_models_that_are_equal(kind):
    assert ddpkit.spawn(train, (kind,), view=False).values == [0, 1]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("past the wrapper", "Net: first.weight has the norm "),
        ("no_sync", "Net: first.weight has the norm "),
        ("changed by hand", "Net: last.bias has the "),
        ("negated", "Net: last.weight has the mean "),
        ("the older one drifts", "Net: last.bias has the "),
    ],
)
def test_models_that_have_drifted_apart(kind, first, start_method):
    with pytest.raises(ddpkit.RanksDisagree) as caught:
        ddpkit.spawn(train, (kind,), start_method=start_method, view=False)
    text = str(caught.value)
    assert text.startswith("the ranks' copies of a DDP model have drifted apart") and first in text
    assert "in rank 0 and" in text and "in rank 1 (" in text and "past the wrapper" in text
    assert caught.value.run.values == [0, 1]  # nothing is lost


def test_drift_that_is_meant():
    assert ddpkit.spawn(train, ("no_sync",), env={"DDPKIT_RECORD": "0"}, view=False).values == [0, 1]


def test_groups_of_some_ranks():
    def pairs(rank, drifts):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        torch.manual_seed(rank)
        model = DDP(torch.nn.Linear(2, 1), process_group=groups[rank // 2])  # each pair has a model of its own
        if drifts and rank == 3:
            model.module.bias.data += 1
        dist.barrier()
        return "done"

    assert ddpkit.spawn(pairs, (False,), nprocs=4, view=False).values == ["done"] * 4
    with pytest.raises(ddpkit.RanksDisagree, match=r"Linear: bias has the norm .* in rank 2 and .* in rank 3 \(1 of 2"):
        ddpkit.spawn(pairs, (True,), nprocs=4, view=False)


def test_parameters_that_nobody_foresaw_do_no_harm():
    def odd(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")

        class Odd(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
                self.weight = torch.nn.Parameter(torch.ones(3, 2).t())

            def forward(self, x):
                return (self.weight @ x).sum() + self.complex.abs().sum()

        model = DDP(Odd())
        model(torch.ones(3)).backward()
        model.module.named_parameters = None  # cannot be called
        return "done"

    assert ddpkit.spawn(odd, view=False).values == ["done", "done"]


def test_how_many_models_are_kept():
    def many(rank, keep):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        from ddpkit import drift
        from ddpkit import rank as here

        drift.KEEP = keep
        dist.init_process_group("gloo")
        for _ in range(5):
            DDP(torch.nn.Linear(250, 1, bias=False))  # 1,000 bytes
        return [model["number"] for model in here.current.models.weights(rank).models]

    assert ddpkit.spawn(many, (3500,), view=False).values == [[2, 3, 4]] * 2
    assert ddpkit.spawn(many, (10,), view=False).values == [[4]] * 2


def one(rank, number=0, ranks=(0, 1), **parameters):
    return Weights(rank, [{"number": number, "ranks": list(ranks), "name": "Net", "parameters": parameters}])


def test_what_is_compared():
    assert difference({}) == ""
    assert difference({0: Weights(0, []), 1: one(1, weight=[1, 2.0, 3.0])}) == ""
    assert difference({0: one(0, weight=[1, 2.0, 3.0]), 1: one(1, number=1, weight=[2, 9.0, 3.0])}) == ""
    assert difference({0: one(0, weight=[1, 2.0, 3.0]), 1: one(1, bias=[2, 9.0, 3.0])}) == ""
    three = {rank: one(rank, a=[0, 1.0, 1.0], b=[rank // 2, 1.0 + rank // 2, 1.0]) for rank in range(3)}
    assert difference(three) == "Net: b has the norm 1 in rank 0 and 2 in rank 2 (1 of 2 parameters differ)"
