"""All that runs inside a rank, before and after the user's function.

A rank made by the forkserver is a copy of it; a spawned one is a fresh interpreter. What the user's function finds must be the same in both:
the notebook's environment, folder and import path, a `__main__` with what the cells defined, fresh random numbers, its share of the cores.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import linecache
import logging
import multiprocessing.util
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ddpkit import collectives, drift, limits, payload, rendezvous
from ddpkit.messages import Ask, Failure, Leave, Message, Metrics, Start, Value, decode, encode

OUR_FOLDER = os.path.dirname(__file__) + os.sep
CALL_SIZE = 1024
RECORD = "DDPKIT_RECORD"
"""Environment variable: "0" keeps no record of collectives and of DDP models. Then ranks that stand still are noticed only after `timeout`."""


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what connects it to its agent. Goes to the new process with `start_processes`."""

    rank: int
    start: Start | None
    """None where the rank is spawned: it comes through `control` then. `start_processes` would wait until the new process has loaded torch
    and read it, before it starts the next one."""
    port: int
    control: Connection
    output: Connection
    crash: Connection
    """For the stacks that Python's faulthandler writes when the process crashes."""
    last_call: Any
    """Shared memory, `CALL_SIZE` bytes: the last collective that was called, as JSON. What is written there outlives a crash."""
    inherited: tuple[int, ...] = ()
    """Descriptors of the agent that a forked rank has got copies of, and must close: a pipe ends only when all copies of its end are closed."""


class Rank:
    """The process's line to its agent, for everything that wants to tell the notebook something."""

    def __init__(self, place: Place) -> None:
        self.number = place.rank
        self._control = place.control
        self._lock = threading.Lock()
        self._may_leave = threading.Event()
        self._last_call = place.last_call
        self.record = collectives.Record(self._note)
        self.models = drift.Models()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """For a rank that stays: what it is to do."""

    def send(self, message: Message) -> None:
        """Send to the notebook; from any thread."""
        data = encode(message)
        with self._lock:
            self._control.send_bytes(data)

    def log(self, numbers: dict[str, float | int | str | bool | None]) -> None:
        """Send numbers to the notebook."""
        self.send(Metrics(self.number, numbers))

    def _note(self, call: dict[str, Any]) -> None:
        data = json.dumps(call).encode()
        self._last_call.value = data if len(data) < CALL_SIZE else b""

    def listen(self) -> None:
        """Hear the agent, in a thread of its own; die with it. (Linux has a signal for that, the others do not.)"""

        def hear() -> None:
            try:
                while True:
                    message = decode(self._control.recv_bytes())
                    if isinstance(message, Leave):
                        self._may_leave.set()
                    elif isinstance(message, Ask):
                        self.send(self.record.stand(self.number, _own_frames))
                    else:
                        self.inbox.put(message)
            except (EOFError, OSError):
                end_own_group()

        threading.Thread(target=hear, name="ddpkit-agent", daemon=True).start()

    def wait_to_leave(self) -> None:
        """Wait until all ranks are done. A rank that closes its connections while others still work makes their collectives fail."""
        self._may_leave.wait()


current: Rank | None = None
"""This process's line to its agent; None in a process that is no rank of ddpkit's (the notebook, a script under torchrun)."""


def main(_index: int, place: Place) -> None:
    """What a rank's process runs. `_index` is `start_processes`' own number, always 0: each rank is started by a call of its own."""
    global current
    _become_own_process(place)
    current = rank = Rank(place)
    stage = "preparing the process"
    try:
        start = place.start or decode(place.control.recv_bytes())
        assert isinstance(start, Start)
        rank.listen()
        _look_spawned(place.rank, start, place.port)
        if os.environ.get(RECORD) != "0":
            rank.record.attach()
            rank.models.attach()
        if start.stays:
            from ddpkit import shell  # only here: IPython is not everybody's

            shell.serve(rank)
        stage = "unpickling the function"
        fn, args = payload.unpack_call(start.payload)
        stage = "running the function"
        value = fn(place.rank, *args)
        stage = "pickling the returned value"
        packed = payload.pack_value(value)
        flush()
        rank.send(Value(place.rank, packed))
        rank.send(rank.models.weights(place.rank))
    except BaseException as error:  # the notebook must hear of everything that ended the function: SystemExit and KeyboardInterrupt too
        moment = time.monotonic()
        # Frames hold what the function held. A DataLoader's iterator that goes before the failure is sent holds it up: it waits for its workers.
        traceback_of_error = error.__traceback__  # noqa: F841
        flush()
        rank.send(failure(place.rank, stage, error, moment))
    rank.send(rank.record.stand(rank.number, _own_frames))
    rank.send(rank.record.calls(rank.number))
    rank.wait_to_leave()
    _leave()


def _become_own_process(place: Place) -> None:
    for descriptor in place.inherited:
        os.close(descriptor)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a process group of its own, so that all it starts can be ended with it
    if sys.platform.startswith("linux"):
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

        _prctl_pr_set_pdeathsig(signal.SIGKILL)  # torch's start_processes sets SIGINT, which Python code can ignore
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = _descriptor(place.output)
    for stream in (1, 2):
        os.dup2(output, stream)
    for name in ("stdout", "stderr"):
        # Lines go out as they are made: a rank may be killed at any moment, and its last words are wanted. What is no UTF-8 is escaped.
        text = open(1 if name == "stdout" else 2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    faulthandler.enable(_descriptor(place.crash))
    if place.start is not None:
        # Forked: what torch registered in the forkserver has nothing to clean up here, and takes 30 ms to find that out.
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _descriptor(connection: Connection) -> int:
    if sys.platform != "win32":
        return connection.fileno()
    import msvcrt

    return msvcrt.open_osfhandle(connection.fileno(), os.O_APPEND)


def _look_spawned(rank: int, start: Start, port: int) -> None:
    """Make a copy of the forkserver look like a fresh process of the notebook's. In a spawned rank most of this changes nothing."""
    limits.raise_limit_of_files(start.nprocs)
    environment = dict(start.environment)
    for name, value in rendezvous.environment(rank, start.nprocs, port, start.threads).items():
        if not (name in rendezvous.KEPT_FROM_USER and name in environment):
            environment[name] = value
    if environment.get("MPLBACKEND", "").startswith("module://"):
        environment["MPLBACKEND"] = "agg"  # the notebook's backend draws into the notebook, and a rank has none
    environment.update(start.overrides)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # where the notebook's environment says, not the forkserver's
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    sys.argv[:] = start.argv
    for name, lines in start.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    # A fresh __main__ without a file: nothing for multiprocessing to run again in processes that the rank starts.
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main_module
    multiprocessing.set_start_method(None, force=True)  # a spawned process would spawn its own; a script's processes start as the platform has it
    payload.pickle_main_by_value()

    import torch

    random.seed()
    torch.default_generator.seed()  # not torch.seed(): it also notes for each GPU, with a stack trace, what to do when CUDA is first used
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]) if environment["OMP_NUM_THREADS"].isdigit() else start.threads)
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # torch reads TORCH_DISTRIBUTED_DEBUG when it is imported, for a forked rank too early
        rendezvous.prepare_init(start.timeout, port)


def failure(rank: int, stage: str, error: BaseException, moment: float) -> Failure:
    """An exception, as a message."""
    errors: list[dict[str, Any]] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        errors.insert(0, {"type": _type_name(link), "text": _text(link) + _named_parameters(link), "frames": _frames(link)})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    try:
        packed = payload.pack_value(error.with_traceback(None))
    except Exception:  # an exception may hold anything; its text is on its way all the same
        packed = b""
    calls = current.record.entries if current is not None else ()
    return Failure(rank, stage, errors, moment, dict(calls[-1]) if calls else None, packed)


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # __str__ of a user's class
        return f"<its __str__ raised {type(second).__name__}>"


def _named_parameters(error: BaseException) -> str:
    """DDP names parameters without a gradient by their index; their names are in the wrapper that raised it."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)", _text(error))
    frame = error.__traceback__
    while found and frame is not None:
        model = frame.tb_frame.f_locals.get("self")
        if model is not None and hasattr(model, "reducer") and hasattr(model, "named_parameters"):
            names = [name.removeprefix("module.") for name, p in model.named_parameters() if p.requires_grad]
            indices = [int(i) for i in found[1].split() if int(i) < len(names)]
            return f"\n(by name: {', '.join(names[i] for i in indices)})"
        frame = frame.tb_next
    return ""


def _frames(error: BaseException) -> list[list[Any]]:
    return _plain(traceback.extract_tb(error.__traceback__))


def _own_frames(frame: types.FrameType | None) -> list[list[Any]]:
    """A stack that is still running, from the user's function on: what is above it is the kit's and multiprocessing's."""
    stack = traceback.extract_stack(frame)
    ours = [number for number, entry in enumerate(stack) if entry.filename == __file__]
    return _plain(stack[ours[0] + 1 :] if ours else stack)


def _plain(stack: Iterable[traceback.FrameSummary]) -> list[list[Any]]:
    """Frames as [file, line, function, source], the kit's own left out."""
    return [[f.filename, f.lineno or 0, f.name, f.line or ""] for f in stack if not f.filename.startswith(OUR_FOLDER)]


def flush() -> None:
    """Let all that was printed be on its way."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the user's function closed or replaced it: nothing is left to flush


def _leave() -> None:
    """End the process as the interpreter would, without tearing torch down: C++ destructors of a process group may wait for other ranks.

    Threads that are not daemons are waited for, and functions registered with atexit run, in a forked rank as in a spawned one.
    (multiprocessing runs them only in spawned processes.)
    """
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()  # no public name does this without ending the interpreter as well
    finally:
        flush()
        os._exit(0)


def end_own_group() -> None:
    """End this process and all that it has started, at once."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
