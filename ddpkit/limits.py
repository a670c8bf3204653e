"""What this machine can carry: cores, memory and open files, as the control group allows (Binder, Docker, Slurm), not as the hardware has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

RANK_MB = {"forkserver": 30, "spawn": 450}
"""Memory that one more rank takes for certain, in MB, before it has a model or data. Measured with torch 2.14.1 (CUDA build) on Linux: a
forked rank shares torch's memory with the forkserver and owns about 20 MB after its first DDP step; a spawned one loads torch again."""
FILES_PER_RANK = 10
"""Open files that the agent holds for one rank (its pipes, its handle, its connections to the store), rounded up."""
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: the scheduler's mask and the control group's quota counted, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, min(allowed, int(quota)) if quota else allowed)


def threads_per_rank(nprocs: int) -> int:
    """Threads for each rank so that all of them together use the cores once; at least 1."""
    return max(1, cores() // nprocs)


def memory_available() -> int:
    """Bytes that new processes may take: what the machine has left, or what the control group has left where that is less."""
    available = int(psutil.virtual_memory().available)
    left = _cgroup_memory_left()
    return available if left is None else min(available, left)


def ranks_that_fit(start_method: str) -> int:
    """How many ranks the memory that is left can hold."""
    return max(0, memory_available() // (RANK_MB[start_method] << 20))


def check_ranks(nprocs: int, start_method: str) -> None:
    """Raise ValueError where so many ranks cannot be held, with the number that fits."""
    fit = ranks_that_fit(start_method)
    if nprocs > fit:
        need, have = nprocs * RANK_MB[start_method], memory_available() >> 20
        raise ValueError(
            f"{nprocs} ranks do not fit into memory: they need about {need:,} MB and {have:,} MB are available. "
            f"At most {fit} fit here: use nprocs={max(1, fit)}."
        )
    limit = _hard_limit_of_files()
    if limit is not None and 64 + nprocs * FILES_PER_RANK > limit:
        fit = max(1, (limit - 64) // FILES_PER_RANK)
        raise ValueError(
            f"{nprocs} ranks need about {64 + nprocs * FILES_PER_RANK:,} open files and this machine allows {limit:,}: "
            f"use nprocs={fit}, or raise the limit (ulimit -Hn)."
        )


def raise_limit_of_files(nprocs: int) -> None:
    """In an agent or a rank: allow as many open files as `nprocs` ranks need, where the default (often 1,024) is less."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 256 + nprocs * FILES_PER_RANK
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard))


def _hard_limit_of_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _own_cgroups() -> dict[str, Path]:
    """The folders of the control groups that this process is in, by controller ("" for version 2). Empty where there are none."""
    folders: dict[str, Path] = {}
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            base = CGROUP if controller == "" else CGROUP / controller
            # In a container the path is the host's, and the container sees its own group at the root.
            folders[controller] = base / path.lstrip("/") if (base / path.lstrip("/")).is_dir() else base
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def _up_to_root(folder: Path) -> list[Path]:
    """A limit on any group above counts too."""
    return [folder, *(p for p in folder.parents if p == CGROUP or CGROUP in p.parents)]


def _cgroup_cores() -> float | None:
    groups = _own_cgroups()
    quotas: list[float] = []
    if "" in groups:
        for folder in _up_to_root(groups[""]):
            try:
                quota, period = (folder / "cpu.max").read_text().split()
            except (OSError, ValueError):
                continue
            if quota != "max":
                quotas.append(int(quota) / int(period))
    if "cpu" in groups:
        for folder in _up_to_root(groups["cpu"]):
            quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota_us and period_us and quota_us > 0:
                quotas.append(quota_us / period_us)
    return min(quotas) if quotas else None


def _cgroup_memory_left() -> int | None:
    groups = _own_cgroups()
    left: list[int] = []
    for controller, limit_name, usage_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _up_to_root(groups[controller]) if controller in groups else []:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                left.append(max(0, limit - usage + _reclaimable(folder)))
    return min(left) if left else None


def kills_for_memory() -> int:
    """How many processes Linux has killed for want of memory so far: in this control group, or on this machine where the group does not tell."""
    for folder, name in _memory_groups():
        for line in _lines(folder / {"": "memory.events", "memory": "memory.oom_control"}[name]):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return next((int(line.split()[1]) for line in _lines(Path("/proc/vmstat")) if line.startswith("oom_kill ")), 0)


def memory_in_words() -> str:
    """The memory limit that counts here, and the highest use so far."""
    best: tuple[int, int] | None = None
    for folder, name in _memory_groups():
        limits, peaks = (
            (("memory.max",), ("memory.peak", "memory.current")) if name == "" else (("memory.limit_in_bytes",), ("memory.max_usage_in_bytes",))
        )
        for group in _up_to_root(folder):
            limit = next((n for n in (_number(group / file) for file in limits) if n is not None), None)
            peak = next((n for n in (_number(group / file) for file in peaks) if n is not None), None)
            if limit is not None and peak is not None and limit < psutil.virtual_memory().total and (best is None or limit < best[0]):
                best = (limit, peak)
    if best is not None:
        return f"this control group may use {best[0] >> 20:,} MB and has used up to {best[1] >> 20:,} MB"
    memory = psutil.virtual_memory()
    return f"this machine has {memory.total >> 20:,} MB, of which {memory.available >> 20:,} MB are available now"


def _memory_groups() -> list[tuple[Path, str]]:
    return [(folder, name) for name, folder in _own_cgroups().items() if name in ("", "memory")]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel counts as used and gives back when somebody needs them."""
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
