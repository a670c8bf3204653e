"""Real PyTorch distributed training from a notebook cell.

import ddpkit

run = ddpkit.spawn(train, nprocs=2)     # train(rank) in two real processes
run.values                              # what each rank returned
"""

from __future__ import annotations

import os as _os
from typing import Any as _Any

from ddpkit import explore
from ddpkit.course.checks import check, hint, solution
from ddpkit.course.predict import predict
from ddpkit.doctor import doctor
from ddpkit.errors import LaunchFailed, RankDied, RankError, RankFailed, RanksDisagree, RanksStuck
from ddpkit.metrics import log
from ddpkit.payload import NotPicklable
from ddpkit.ranks import Ranks
from ddpkit.spawn import Run, spawn
from ddpkit.supervise import INSIDE as _INSIDE
from ddpkit.supervise import forkserver as _forkserver

__all__ = [
    "LaunchFailed",
    "NotPicklable",
    "RankDied",
    "RankError",
    "RankFailed",
    "Ranks",
    "RanksDisagree",
    "RanksStuck",
    "Run",
    "check",
    "doctor",
    "explore",
    "hint",
    "log",
    "predict",
    "solution",
    "spawn",
]
__version__ = "0.1.0"


def load_ipython_extension(shell: _Any) -> None:
    """`%load_ext ddpkit`: gives the notebook `%ranks` and `%%ranks`."""
    from ddpkit.magics import RanksMagics

    shell.register_magics(RanksMagics)


def _wants_warmth() -> bool:
    """Whether this process is likely to start ranks: not one that the kit started itself, not a rank of any launcher, not a child."""
    from multiprocessing import parent_process

    from ddpkit.supervise import CAN_FORK

    return CAN_FORK and _INSIDE not in _os.environ and "RANK" not in _os.environ and parent_process() is None


if _wants_warmth():
    # The forkserver loads torch while the reader still reads: the first run then starts as fast as the later ones.
    _forkserver.warm()
