"""What the figures were measured on, and what processes take of its memory."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil

from ddpkit import limits

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""For all launchers alike. torchrun would set this itself, and says so."""


def about() -> dict[str, str]:
    """The machine, what else it does at the moment, and the versions, as text by name."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": f"{limits.cores()} cores ({models[0] if models else platform.machine()}), {psutil.virtual_memory().total / 2**30:.0f} GB memory",
        "busy before the start": f"{psutil.cpu_percent(1.0):.0f} % of the cores (figures of a busy machine say little)",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, ddpkit {version('ddpkit')}, Linux {platform.release()}",
    }


def fill_page_cache() -> None:
    """Read torch's files once, so that the first launcher is not the one that pays for the disk."""
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo, torch.nn.parallel.distributed, torchvision"], check=True)


def pss_mb(pid: int) -> float:
    """A process's share of memory in MB: what it has alone, and its part of what it shares. 0 where it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def below_mb(pid: int) -> float:
    """The same for all processes below one, in MB. What they share with each other is in it once."""
    return sum(pss_mb(process.pid) for process in psutil.Process(pid).children(recursive=True))


def run(command: list[str], seconds: float) -> str:
    """Run a command with `ENVIRONMENT` and return its stdout. Raises RuntimeError where it fails or is not done in time; ends all of it then."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end in {seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"status {process.returncode}"])[-1][:200])
    return out
