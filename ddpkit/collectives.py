"""The record of collectives: what each rank called, in which order, and who waits for whom.

In a rank, a `Record` hears of every collective through hooks that torch calls at C++ level, so DDP's own all-reduces are in it. When the
agent asks (once a second), it says where the rank stands. In the notebook, `Standstill` puts the answers of all ranks together.

A rank *stands still* when its main thread is inside a collective, or inside `init_process_group`, and the process has used no processor time
since it was last asked. Ranks that compute, sleep, read a disk or wait for a download are not in a collective. Ranks that exchange data use
the processor. When every rank stands still or has ended, nothing can move any more, and no time limit needs to be waited for.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ddpkit.messages import Calls, Stand

KEPT = 2000
"""Collectives of a rank that are remembered, the newest: as many as torch's flight recorder keeps by default."""
PATIENCE = 2.5
"""Seconds of standing still, seen at several looks, after which ranks are stuck. Long enough for a machine that swaps or is very busy: there,
ranks still use the processor from one look to the next."""
IDLE = 0.1
"""The part of a core that a process may use and still stand still. The kit's own look costs about a thousandth."""

_WAITS_IN = ("distributed/distributed_c10d.py", "distributed/rendezvous.py", "distributed/utils.py", "nn/parallel/distributed.py")
"""Files of torch in which a rank that does not compute waits for other ranks (at C++ level, below Python)."""
_ENGINE = "autograd/graph.py"
_POINT_TO_POINT = ("send", "recv")


@dataclass
class _Group:
    """What is known of one process group in this rank."""

    name: str
    ranks: list[int]
    called: int = 0


class Record:
    """The collectives of this rank, newest last."""

    def __init__(self, note: Callable[[dict[str, Any]], None] = lambda entry: None) -> None:
        self._note = note
        """Told of each collective before it begins; it may be the last."""
        self.entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._groups: list[_Group] = []
        self._last_work: Any = None
        self._waiting = 0

    def attach(self) -> None:
        """Follow the groups that this process makes from now on.

        With an older torch, which lacks the hooks, what a rank waits in is still known by the name of the function, and nothing else is.
        """
        import torch.distributed as dist

        self._follow_new_groups(dist)
        work = torch_work()
        original = work.wait

        def wait(this: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(this, *args, **kwargs)
            self._waiting += 1
            try:
                return original(this, *args, **kwargs)
            finally:
                self._waiting -= 1

        work.wait = wait

    def _follow_new_groups(self, dist: Any) -> None:
        c10d = dist.distributed_c10d
        make = c10d._new_process_group_helper  # where all ways of making a group meet: init_process_group, new_group, DeviceMesh

        def helper(*args: Any, **kwargs: Any) -> Any:
            subgroup = dist.is_initialized()
            group, store = make(*args, **kwargs)
            if hasattr(group, "register_pre_hook"):
                self.follow(group, list(args[2]) if len(args) > 2 and args[2] else list(range(group.size())), subgroup)
            return group, store

        c10d._new_process_group_helper = helper

    def follow(self, group: Any, ranks: list[int], subgroup: bool) -> None:
        """Note what is called on a group."""
        name = f"group of ranks {', '.join(map(str, ranks))}" if subgroup else "default group"
        again = sum(g.name.partition(" (#")[0] == name for g in self._groups)
        known = _Group(f"{name} (#{again + 1})" if again else name, ranks)
        self._groups.append(known)

        def before(call: Any) -> None:
            name = call.name.name.lower()
            number = 0
            if name not in _POINT_TO_POINT:
                number = known.called = known.called + 1
            inputs = call.input_tensors
            tensors = inputs or call.output_tensors
            entry = {
                "group": known.name,
                "number": number,
                "op": _OPS.get(name, name),
                "root": call.root,
                "dtype": str(tensors[0].dtype)[6:] if tensors else "",
                "shapes": [list(t.shape) for t in tensors],
            }
            self.entries.append(entry)
            self._note(entry)

        def after(call: Any) -> None:
            self._last_work = call.work

        number = len(self._groups)  # hooks are told apart by a number of our choice
        group.register_pre_hook(number, before)
        group.register_post_hook(number, after)

    def stand(self, rank: int, own_frames: Any) -> Stand:
        """Where this rank stands now; from any thread. `own_frames` makes the user's frames of a stack."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        file = frame.f_code.co_filename.replace("\\", "/") if frame is not None else ""
        unfinished = self._last_work is not None and not self._last_work.is_completed()
        waits = bool(self._waiting) or file.endswith(_WAITS_IN) or (file.endswith(_ENGINE) and unfinished)
        where = own_frames(frame)
        collective: dict[str, Any] | None = None
        joins: list[int] = []
        if any(entry[2] == "init_process_group" for entry in where):
            joins = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE") if os.environ.get(name, "").isdigit()]
        elif waits:
            known = self.entries and (self._waiting or unfinished)
            collective = dict(self.entries[-1]) if known else {"op": _called_function(where), "number": 0, "group": ""}
        called = {g.name: g.called for g in self._groups}
        return Stand(rank, time.monotonic(), time.process_time(), waits, collective, where, called, psutil.Process().memory_info().rss, joins)

    def calls(self, rank: int) -> Calls:
        """All that is remembered, as a message: training repeats itself, so each kind of call is sent once."""
        groups: dict[str, Any] = {}
        kinds: dict[tuple[Any, ...], int] = {}
        for entry in self.entries:
            if entry["number"]:
                group = groups.setdefault(entry["group"], {"first": entry["number"], "kinds": [], "sequence": []})
                key = (entry["group"], *signature(entry))
                if key not in kinds:
                    kinds[key] = len(group["kinds"])
                    group["kinds"].append(entry)
                group["sequence"].append(kinds[key])
        for known in self._groups:  # where nothing was called, or nothing of it is remembered, that is said as well
            groups.setdefault(known.name, {"first": known.called + 1, "kinds": [], "sequence": []})
        return Calls(rank, groups)


def _called_function(frames: list[list[Any]]) -> str:
    """What the user called: the first function of torch's own in a stack."""
    names = [name for file, _, name, _ in frames if "/torch/" in file.replace("\\", "/") and name != "wrapper" and name[0] != "_"]
    return names[0] if names else "a collective"


_OPS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
"""torch's Python names, where its C++ names differ."""


def torch_work() -> Any:
    """torch's class of handles of running collectives."""
    from torch._C import _distributed_c10d

    return _distributed_c10d.Work


def describe(collective: dict[str, Any]) -> str:
    """A collective in a few words: `all_reduce (float32 [3], number 2 of the default group)`."""
    if "dtype" not in collective:
        return str(collective["op"])
    shapes = ", ".join(str(shape) for shape in collective["shapes"][:3]) + (", …" if len(collective["shapes"]) > 3 else "")
    tensors = f"{collective['dtype']} {shapes}, " if shapes else ""
    if collective["op"] in _POINT_TO_POINT:
        return f"{collective['op']} ({tensors}{'to' if collective['op'] == 'send' else 'from'} rank {collective['root']})"
    root = f"from rank {collective['root']}, " if collective["op"] == "broadcast" else ""
    return f"{collective['op']} ({tensors}{root}number {collective['number']} of the {collective['group']})"


def signature(collective: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal in all ranks of a group for their call number N.

    For operations in which ranks may give tensors of unlike sizes by design (scatter, gather, all-to-all), that is the operation alone.
    """
    sizes = [math.prod(shape) for shape in collective["shapes"]] if collective["op"] in _SAME_SIZE else []
    return (collective["op"], collective["root"], collective["dtype"] if sizes else "", *sizes)


_SAME_SIZE = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


def disagreement(calls: Mapping[int, Calls]) -> str:
    """The first call of a group in which ranks did unlike things although nobody waited, in words; empty where there is none."""
    for rank, one in sorted(calls.items()):
        for other_rank, other in sorted(calls.items()):
            for group in one.groups.keys() & other.groups.keys() if rank < other_rank else ():
                a, b = one.groups[group], other.groups[group]
                start = max(a["first"], b["first"])
                ours, theirs = ([g["kinds"][i] for i in g["sequence"][start - g["first"] :]] for g in (a, b))
                for number, (mine, yours) in enumerate(zip(ours, theirs, strict=False), start):
                    if signature(mine) != signature(yours):
                        mine, yours = mine | {"number": number}, yours | {"number": number}
                        return f"rank {rank} called {describe(mine)}\nrank {other_rank} called {describe(yours)}"
                if len(ours) != len(theirs):
                    return (
                        f"rank {rank} made {start - 1 + len(ours)} calls in the {group}\n"
                        f"rank {other_rank} made {start - 1 + len(theirs)} calls in the {group}"
                    )
    return ""


class Standstill:
    """In the notebook: the ranks' answers put together."""

    def __init__(self, nprocs: int) -> None:
        self._nprocs = nprocs
        self._last: dict[int, Stand] = {}
        self._before: dict[int, Stand] = {}
        self._since: dict[int, float] = {}
        """Since when each rank has stood still, by the ranks' clock."""

    def hear(self, stand: Stand) -> None:
        """Take a rank's answer."""
        before = self._before.get(stand.rank)
        self._before[stand.rank] = self._last[stand.rank] = stand
        if before is None or not _still(before, stand):
            self._since.pop(stand.rank, None)
        else:
            self._since.setdefault(stand.rank, before.moment)

    def moved(self) -> None:
        """Something has happened (a rank has returned): what the others answered before that says nothing any more."""
        self._before.clear()
        self._since.clear()

    def stuck(self, ended: Iterable[int]) -> list[Stand]:
        """The ranks that wait for ever, in order; empty while anything may still move. `ended`: the ranks that have returned or are gone."""
        gone = set(ended)
        waiting = [rank for rank in range(self._nprocs) if rank not in gone]
        if not waiting or any(rank not in self._since for rank in waiting):
            return []
        if min(self._last[rank].moment - self._since[rank] for rank in waiting) < PATIENCE:
            return []
        return [self._last[rank] for rank in waiting]

    def last(self) -> dict[int, Stand]:
        """Each rank's newest answer."""
        return dict(self._last)


def _still(before: Stand, now: Stand) -> bool:
    """Nothing has moved from one answer to the next."""
    if not (before.waits and now.waits):
        return False
    same = before.called == now.called and before.frames == now.frames
    return same and now.cpu - before.cpu < IDLE * max(now.moment - before.moment, 0.001)


def first_difference(
    stands: Sequence[Stand], calls: Mapping[int, Calls] | None = None
) -> tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]] | None:
    """Two ranks, each with its collective, that did unlike things in the same call of the same group, if there are.

    `calls`: what the ranks did that have returned already. One of them may have gone on with garbage where the other waits for more.
    """
    waits = [(stand.rank, stand.collective) for stand in stands if stand.collective and stand.collective["number"]]
    for rank, mine in waits:
        made = [(other, _call(known, mine)) for other, known in sorted((calls or {}).items())]
        for other, yours in [*waits, *((other, call) for other, call in made if call)]:
            same = mine["group"] == yours["group"] and mine["number"] == yours["number"]
            if other != rank and same and signature(mine) != signature(yours):
                return min((rank, mine), (other, yours), key=lambda one: one[0]), max((rank, mine), (other, yours), key=lambda one: one[0])
    return None


def _call(calls: Calls, like: dict[str, Any]) -> dict[str, Any] | None:
    """The call of the same group with the same number, where a rank has made it and it is remembered."""
    group = calls.groups.get(like["group"], {"first": 1, "sequence": []})
    index = like["number"] - group["first"]
    return group["kinds"][group["sequence"][index]] | {"number": like["number"]} if 0 <= index < len(group["sequence"]) else None
