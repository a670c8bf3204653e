"""What a run may not leave behind, and how to look for it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import psutil

from ddpkit.supervise import forkserver


def processes() -> list[str]:
    """Processes below this one, the kit's forkserver and Python's own resource tracker left out. Zombies count."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid != forkserver.pid and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:80]}")
        except psutil.NoSuchProcess:
            pass
    return found


def snapshot() -> dict[str, object]:
    """All that could grow from run to run."""
    temp = Path(tempfile.gettempdir())
    return {
        "processes": len(processes()),
        "threads": threading.active_count(),
        "descriptors": psutil.Process().num_fds(),
        "listening": sorted(
            c.laddr.port
            for p in [psutil.Process(), *psutil.Process().children(recursive=True)]
            for c in _connections(p)
            if c.status == psutil.CONN_LISTEN
        ),
        "shared memory": sorted(filter(_ours, os.listdir("/dev/shm"))) if os.path.isdir("/dev/shm") else [],
        "temporary files": sorted(p.name for p in temp.iterdir() if p.name.startswith(("ddpkit", "pytorch-errorfile", "pymp-"))),
    }


def still_alive(started: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Which of these processes have not ended in time. A zombie has: it only waits for its new parent (init, as a rule) to take notice."""
    found = []
    for process in psutil.wait_procs(started, timeout=seconds)[1]:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass  # it ended in this moment
    return found


def _ours(name: str) -> bool:
    """False for the folder of a run of another notebook (or another test) that is going on."""
    kit, _, rest = name.partition("-")
    pid = rest.partition("-")[0]
    return not (kit == "ddpkit" and pid.isdigit() and int(pid) != os.getpid() and psutil.pid_exists(int(pid)))


def _connections(process: psutil.Process) -> list[psutil._common.pconn]:
    try:
        return process.net_connections()
    except psutil.NoSuchProcess:
        return []


def settled(before: dict[str, object], seconds: float = 5.0) -> dict[str, object]:
    """A snapshot, taken again until it equals `before` or the time is over: the last process ends a moment after its last word."""
    deadline = time.monotonic() + seconds
    while (now := snapshot()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return now
