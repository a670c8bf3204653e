"""An import or a constant of another cell is unknown in the rank, or has an old value; what a rank changes is unchanged in the notebook.

pytorch/pytorch#20375, Lightning-AI/pytorch-lightning#10896
"""

from __future__ import annotations

import pytest


def test_names_of_other_cells_have_their_present_values(kernel, start_method):
    kernel.check("import math, ddpkit")
    kernel.check("SCALE = 3\nhistory = []")
    kernel.check("""
def work(rank):
    history.append(rank)
    return math.floor(rank * SCALE + 0.5), list(history)
""")
    call = f"ddpkit.spawn(work, start_method={start_method!r}).values"
    kernel.check(f"assert {call} == [(0, [0]), (3, [1])]")
    kernel.check("assert history == []")  # ranks had their own copy
    kernel.check(f"SCALE = 5\nassert {call} == [(0, [0]), (5, [1])]")  # no stale value
    kernel.check("def work(rank):\n    return rank + SCALE")  # the cell is edited and run again
    kernel.check(f"assert {call} == [5, 6]")


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_model_given_to_ranks_stays_as_it_is(kernel, method):
    kernel.check("""
import ddpkit, torch
def train(rank, model):
    with torch.no_grad():
        model.weight.fill_(7.0)
    return model.weight.item(), model
net = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    net.weight.fill_(1.0)
""")
    kernel.check(f"""
run = ddpkit.spawn(train, (net,), start_method={method!r})
assert [value for value, _ in run] == [7.0, 7.0]
assert net.weight.item() == 1.0
assert all(model is not net and model.weight.item() == 7.0 for _, model in run)     # what is returned comes back
""")
