"""A rank that the system kills because memory ran out, in a control group with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpkit import limits

LIMIT = 1500 << 20

PROGRAM = """
import ddpkit

def train(rank):
    import torch
    print("begins")
    held = []
    while rank == 1:
        held.append(torch.ones(4 << 20))  # 16 MB each
    import time
    time.sleep(60)

try:
    ddpkit.spawn(train, view=False)
except ddpkit.RankDied as error:
    print(error)
print(ddpkit.spawn(abs, view=False).values)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1) that may use `LIMIT` bytes."""
    above = limits._own_cgroups().get("memory")
    if above is None:
        pytest.skip("no memory control groups of version 1 on this machine")
    folder = above / f"ddpkit-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_limit_and_the_use_are_told(group):
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, preexec_fn=enter)
    assert done.returncode == 0, done.stderr
    first, *_, values = done.stdout.splitlines()
    assert first.startswith("rank 1 of 2 died: the system killed its process (SIGKILL, signal 9), because memory ran out: ")
    assert "this control group may use 1,500 MB and has used up to 1,500 MB" in first or "has used up to 1,49" in first
    assert first.endswith("Use fewer ranks or smaller batches.")
    assert "Its last words: begins" in done.stdout
    assert values == "[0, 1]"


def test_words_where_no_group_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "_own_cgroups", dict)
    assert limits.memory_in_words().startswith("this machine has ")
    assert limits.kills_for_memory() >= 0


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("", {"memory.max": "536870912\n", "memory.peak": "536000000\n", "memory.events": "oom 3\noom_kill 2\n"}, ("512 MB", "511 MB")),
        ("", {"memory.max": "536870912\n", "memory.current": "1048576\n", "memory.events": "oom 3\noom_kill 2\n"}, ("512 MB", "1 MB")),
        ("memory", {"memory.limit_in_bytes": "1048576\n", "memory.max_usage_in_bytes": "1048576\n", "memory.oom_control": "oom_kill 2\n"}, ("1 MB",)),
    ],
)
def test_both_versions_of_control_groups(monkeypatch, tmp_path, name, files, words):
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_own_cgroups", lambda: {name: tmp_path})
    assert limits.kills_for_memory() == 2
    assert all(word in limits.memory_in_words() for word in words)
