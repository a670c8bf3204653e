"""`doctor`: what is missing is named with its cure, and a machine that works is said to."""

from __future__ import annotations

import socket
import threading
from importlib import import_module, metadata

import pytest

from ddpkit import limits, supervise

module = import_module("ddpkit.doctor")  # its function of the same name may hide it in the package


@pytest.fixture
def lines():
    """The lines of a new report by name."""
    return lambda: {line.name: line for line in module.doctor().lines}


def test_this_machine_is_ready_and_every_line_has_a_state():
    report = module.doctor()
    assert report.ok and report.summary == "This machine is ready for distributed training."
    assert {line.state for line in report.lines} <= {"ok", "note", "problem"}
    assert all(line.name in repr(report) and line.text in repr(report) for line in report.lines)


def test_a_package_that_is_missing_or_old_is_a_problem_with_its_cure(lines, monkeypatch):
    def version(name):
        if name == "torch":
            return "2.8.1+cpu"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    found = lines()
    assert (found["torch"].state, found["torch"].text) == ("problem", "2.8.1+cpu, and 2.9 is needed")
    assert found["torchvision"].state == "problem" and found["torchvision"].cure == 'pip install "torchvision>=0.24"'
    report = module.doctor()
    assert not report.ok and report.summary.startswith("This machine has problems: run ddpkit.doctor()")
    assert repr(report).startswith("This machine has problems:\n") and "→ pip install" in repr(report)
    assert report._repr_mimebundle_() == {"text/plain": report.summary}


@pytest.mark.parametrize(("fit", "state"), [(0, "problem"), (1, "problem"), (2, "note"), (4, "ok")])
def test_ranks_are_those_that_memory_holds(lines, monkeypatch, fit, state):
    monkeypatch.setattr(limits, "memory_available", lambda: fit * limits.RANK_MB["forkserver"] << 20)
    monkeypatch.setattr(supervise, "CAN_FORK", True)
    assert lines()["ranks"].state == state


def test_ranks_are_those_that_open_files_allow(lines, monkeypatch):
    monkeypatch.setattr(limits, "_hard_limit_of_files", lambda: 64 + 3 * limits.FILES_PER_RANK)
    assert lines()["ranks"].text == "about 3 fit"


def test_one_core_a_missing_launcher_and_small_shared_memory_are_notes(lines, monkeypatch):
    monkeypatch.setattr(limits, "cores", lambda: 1)
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(module, "SHM_MB", 1 << 60)
    found = lines()
    for name in ("cores", "torchrun", "mpirun", *(["/dev/shm"] if "/dev/shm" in found else [])):
        assert found[name].state == "note" and found[name].cure
    assert module.doctor().ok


def test_a_name_that_never_resolves_is_a_note_in_time(lines, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    real, own = socket.getaddrinfo, socket.gethostname()
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **more: asked.wait(60) if name == own else real(name, *args, **more))
    found = lines()["host name"]
    asked.set()
    assert found.state == "note" and "/etc/hosts" in found.cure


def test_a_loopback_that_does_not_work_is_a_problem(lines, monkeypatch):
    def refuse(*_, **__):
        raise OSError("Network is down")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert lines()["loopback"].state == "problem" and "Network is down" in lines()["loopback"].text


@pytest.mark.parametrize(("nccl", "state"), [(True, "ok"), (False, "note")])
def test_gpus_are_counted_without_torch(lines, monkeypatch, tmp_path, nccl, state):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\necho 'GPU 1: H200 (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    real = list(metadata.distributions())
    others = [d for d in real if not d.metadata["Name"].startswith("nvidia-nccl")]
    nccls = [d for d in real if d not in others] or [type("D", (), {"metadata": {"Name": "nvidia-nccl-cu13"}})()]
    monkeypatch.setattr(metadata, "distributions", lambda: others + (nccls if nccl else []))
    found = lines()["backends"]
    assert found.state == state and "2 NVIDIA GPUs" in found.text


def test_the_card_holds_every_line_escaped():
    report = module.Report((module.Line("host name", "problem", "<x> does not", "do & see"),))
    page = report._page()
    assert "&lt;x&gt; does not" in page and "do &amp; see" in page and "problem" in page
