"""Weights that were saved from the DDP wrapper begin with module. and do not fit the plain model; a file with a cell's class is refused.

pytorch/pytorch#3805, ROCm/Megatron-LM#56
"""

from __future__ import annotations

import pytest

from tests.cases import says

CELL = """
from dataclasses import dataclass
import ddpkit
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

@dataclass
class Config:
    width: int = 4

def save(rank, path, wrapped):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 2))
    source = model if wrapped else model.module
    if rank == 0:
        torch.save({"weights": source.state_dict(), "config": Config(5)}, path)
    return sorted(source.state_dict()), model(torch.ones(1, 4)).detach()

def load(rank, path, weights_only):
    saved = torch.load(path, weights_only=weights_only)
    assert type(saved["config"]) is Config
    torch.nn.Linear(4, 2).load_state_dict(saved["weights"])

def load_without_the_class(rank, path):
    torch.load(path, weights_only=False)
"""


@pytest.fixture
def notebook(kernel, tmp_path):
    kernel.check(f"import os; os.chdir({str(tmp_path)!r})")
    kernel.check(CELL)
    yield kernel
    kernel.check("os.chdir('/')")


def test_weights_of_the_module_fit_the_plain_model(notebook):
    notebook.check("""
keys, out = ddpkit.spawn(save, ("good.pt", False))[0]
assert keys == ["bias", "weight"]
saved = torch.load("good.pt", weights_only=False)
plain = torch.nn.Linear(4, 2)
plain.load_state_dict(saved["weights"])      # strict
assert torch.equal(plain(torch.ones(1, 4)), out)
assert type(saved["config"]) is Config and saved["config"] == Config(5)
ddpkit.spawn(load, ("good.pt", False))
""")


def test_weights_of_the_wrapper_are_explained(notebook):
    notebook.check('assert ddpkit.spawn(save, ("bad.pt", True))[0][0] == ["module.bias", "module.weight"]')
    cell = notebook.run('ddpkit.spawn(load, ("bad.pt", False))')
    assert cell.error == "RankFailed"
    says(
        cell.evalue, 'Unexpected key(s) in state_dict: "module.weight", "module.bias"', "in load\n", "the names in one of the two begin with module."
    )
    says(cell.evalue, "save model.module.state_dict()")
    # In the notebook itself torch speaks, and names the keys.
    cell = notebook.run('torch.nn.Linear(4, 2).load_state_dict(torch.load("bad.pt", weights_only=False)["weights"])')
    assert cell.error == "RuntimeError" and 'Unexpected key(s) in state_dict: "module.weight", "module.bias"' in cell.evalue


def test_a_refused_class_is_explained(notebook):
    notebook.check('ddpkit.spawn(save, ("good.pt", False))')
    cell = notebook.run('ddpkit.spawn(load, ("good.pt", True))')
    assert cell.error == "RankFailed"
    says(
        cell.evalue,
        "Weights only load failed",
        "Config",
        "in load\n",
        "the file holds objects besides tensors",
        "save plain dicts",
        "weights_only=False",
    )


def test_a_class_that_the_function_does_not_name_is_explained(notebook):
    notebook.check('ddpkit.spawn(save, ("good.pt", False))')
    cell = notebook.run('ddpkit.spawn(load_without_the_class, ("good.pt",))')
    assert cell.error == "RankFailed"
    says(cell.evalue, "Can't get attribute 'Config'", "in load_without_the_class\n", "typed into a cell", "use the class by name in the function")
