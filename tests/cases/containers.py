"""Programs in surroundings like a container's: little shared memory, little memory, another host name, no network. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cases import program

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def run(folder: Path, code: str, *arguments: str, first: str, spaces: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in name spaces of its own, after the shell commands `first`. Whatever it leaves behind ends with it."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *(f"--{space}" for space in spaces), "sh", "-c"]
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        pytest.skip("name spaces: only on Linux, with the program unshare")
    allowed = subprocess.run([*command, first], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"name spaces are not allowed here: {allowed.stderr.strip()}")
    return program(folder, code, *arguments, before=(*command, f'{first}\nexec "$@"', "sh"))


@contextmanager
def memory(megabytes: int) -> Iterator[tuple[str, ...]]:
    """A control group with so much memory: what to put before a command that is to run in it. Nothing may be left in it in the end."""
    group = MEMORY_GROUPS / f"ddpkit-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    except OSError as error:
        pytest.skip(f"needs control groups for memory (version 1) and the right to make one: {error}")
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs\nexec "$@"', "sh")
    finally:
        deadline = time.monotonic() + 10
        while (left := (group / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.02)
        group_is_empty = not left
        if group_is_empty:
            group.rmdir()
    assert group_is_empty, f"still running: {left}"
