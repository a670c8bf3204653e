"""The process between the notebook and the ranks of one run. It does what torchrun's agent does, for one machine:

hosts the store, starts the ranks with `torch.multiprocessing.start_processes`, passes on what they say, and ends them.

Why not in the notebook's own process? Starting ranks and hosting a store need torch, which takes two seconds and 280 MB where the notebook
has not imported it. And ranks should be children of a process that nobody interrupts, that dies with the notebook, and that adopts whatever
the ranks leave behind, so that nothing outlives a run.

    notebook ──link── agent ──control── rank 0        control: messages in both directions
                        │  └─output──── rank 0        output: what the rank writes to stdout and stderr
                        ├────control─── rank 1
                        …
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import Pipe, RawArray
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from ddpkit import limits, rank, rendezvous
from ddpkit.messages import (
    Ask,
    Deliver,
    Done,
    Ended,
    Failure,
    Interrupt,
    Leave,
    Link,
    Output,
    Shown,
    Stand,
    Start,
    Started,
    Stop,
    Trouble,
    Value,
    decode,
    encode,
)  # fmt: skip

CHUNK = 1 << 16
"""Bytes of output read at a time: what a pipe holds on Linux."""
QUIET = 0.02
"""Seconds between two looks at the ranks' output. Ranks that print at every step would otherwise wake the agent at every step, on a core that
they could use. A full pipe is emptied at once."""
PATIENCE = 1.0
"""Seconds that a rank has after SIGTERM before it is killed. Most end at once; a handler of the user's may want to save something."""
ASK_EVERY = 0.5
"""Seconds between two questions to each rank where it stands; twice that for more than 8 ranks."""
LAST_STEPS = 10.0
"""Seconds that a rank has to end after all ranks have returned: for threads of its own and functions registered with atexit."""
NOT_ENDING = f"(ended by ddpkit: its function had returned {LAST_STEPS:.0f} s before, and a thread or an atexit function of its own still ran)\n"


def main(link: Link) -> None:
    """Serve one run, then return."""
    start = link.receive()
    if not isinstance(start, Start):
        return  # the notebook is gone, or has changed its mind
    try:
        Agent(link, start).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the notebook is gone; `run` has ended the ranks
    except BaseException:
        link.send(Trouble(traceback.format_exc()))


def main_on_stdio() -> None:
    """Serve one run over this process's stdin and stdout, where there is no fork (Windows)."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(devnull, stream)
    os.close(devnull)
    main(Link(reader, writer))


class _Process:
    """A rank as its agent sees it."""

    def __init__(self, number: int, process: BaseProcess, control: Connection, output: Connection, crash: Connection, last_call: Any) -> None:
        self.number = number
        self.process = process
        self.control: Connection | None = control
        self.output: Connection | None = output
        self.crash = crash
        self.last_call = last_call
        self.done = False
        """It has returned or failed, and waits until it may leave."""
        self.ended = False
        self.told = threading.Lock()
        """Held while something is written to it."""
        self.asked = False
        self.busy = True
        """False for a rank that stays and has nothing to do."""
        # multiprocessing's sentinel is the end of a pipe that a rank's own children hold as well: it would tell of the rank's death only
        # after theirs. Linux has a descriptor for the process itself.
        try:
            self.handle = os.pidfd_open(process.pid or 0)
        except (AttributeError, OSError):
            self.handle = process.sentinel


class Agent:
    """One run's ranks."""

    def __init__(self, link: Link, start: Start) -> None:
        self._link = link
        self._start = start
        self._ranks: list[_Process] = []
        self._stopping = threading.Lock()
        self._ending = False
        self._leave_by: float | None = None
        self._short_of_memory = limits.kills_for_memory()
        self._memory: dict[int, int] = {}
        self._ask_at = time.monotonic() + ASK_EVERY

    def run(self) -> None:
        """Start the ranks and pass on what they say until the last one is gone."""
        _adopt_orphans()
        limits.raise_limit_of_files(self._start.nprocs)
        listener = rendezvous.listen(self._start.nprocs)
        store = None
        tempfile.tempdir = self._start.folder
        multiprocessing.current_process()._config["tempdir"] = self._start.folder  # type: ignore[attr-defined]  # ranks inherit it, and their workers
        try:
            self._start_ranks(listener)
            # Only now: a process should not be forked while it has threads, and a store has some. Ranks that were faster wait in the
            # socket's queue.
            store = rendezvous.serve(listener, self._start.timeout)
            threading.Thread(target=self._obey, name="ddpkit-notebook", daemon=True).start()
            self._link.send(Started([r.process.pid or 0 for r in self._ranks], rendezvous.gpus()))
            while not all(r.ended for r in self._ranks):
                self._turn()
        finally:
            self._end_all(patience=0)
            _end_descendants()
            del store  # it has lived until here
            shutil.rmtree(self._start.folder, ignore_errors=True)  # the notebook does it as well; each may be killed

    def _start_ranks(self, listener: socket.socket) -> None:
        from torch.multiprocessing import start_processes

        forked = self._start.start_method == "forkserver"
        port = listener.getsockname()[1]
        for number in range(self._start.nprocs):
            control, ranks_control = Pipe()
            output, ranks_output = Pipe(duplex=False)
            crash, ranks_crash = Pipe(duplex=False)
            last_call = RawArray("c", rank.CALL_SIZE)
            place = rank.Place(
                number,
                self._start if forked else None,
                port,
                ranks_control,
                ranks_output,
                ranks_crash,
                last_call,
                self._descriptors(listener, control, output, crash) if forked else (),
            )
            # A call for each rank, so that each gets its own pipes and no one else's. This process is a fresh copy of the forkserver, with
            # one thread and torch loaded: "fork" here is what a forkserver does.
            context = start_processes(rank.main, args=(place,), nprocs=1, join=False, start_method="fork" if forked else self._start.start_method)
            ranks_control.close()
            ranks_output.close()
            ranks_crash.close()
            process = context.processes[0]
            self._ranks.append(_Process(number, process, control, output, crash, last_call))
            if not forked:
                # In a thread: the pipe is full long before the rank has loaded torch and reads it.
                self._ranks[-1].told.acquire()
                threading.Thread(target=_send_start, args=(self._ranks[-1], control, encode(self._start)), daemon=True).start()

    def _descriptors(self, listener: socket.socket, *newest: Connection) -> tuple[int, ...]:
        """What this process has open and a forked rank must not keep."""
        connections = [c for r in self._ranks for c in (r.control, r.output, r.crash) if c is not None and not c.closed]
        handles = {h for r in self._ranks for h in (r.process.sentinel, r.handle)}
        return (listener.fileno(), *self._link.descriptors(), *(c.fileno() for c in (*connections, *newest)), *handles)

    def _obey(self) -> None:
        """Do what the notebook says, in a thread. A notebook that is gone wants its ranks gone."""
        while (message := self._link.receive()) is not None:
            if isinstance(message, Stop):
                self._end_all()
            elif isinstance(message, Deliver):
                for r in (self._ranks[number] for number in message.ranks):
                    r.busy = True
                    with r.told:
                        _send(r, message.payload)
            elif isinstance(message, Interrupt):
                self._signal_all(signal.SIGINT, message.ranks)
        self._end_all(patience=0)

    def _turn(self) -> None:
        """Wait for something to happen, and pass it on."""
        waiting: dict[Any, tuple[_Process, str]] = {}
        for r in self._ranks:
            if not r.ended:
                waiting[r.handle] = (r, "end")
            if r.control is not None:
                waiting[r.control] = (r, "control")
            if r.output is not None:
                waiting[r.output] = (r, "output")
        until = self._ask_at if self._leave_by is None else min(self._ask_at, self._leave_by)
        ready = wait(list(waiting), max(0.0, until - time.monotonic()))
        if self._leave_by is not None and not self._ending and time.monotonic() >= self._leave_by:
            for r in self._ranks:
                if not r.ended:
                    self._link.send(Output(r.number, NOT_ENDING.encode()))
            self._end_all(patience=0)
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_EVERY * (1 if len(self._ranks) <= 8 else 2)
            for r in self._ranks:
                if r.busy and not r.done and not r.asked and r.told.acquire(blocking=False):
                    r.asked = True  # one that does not answer (stopped, or busy in compiled code) is not asked again
                    _send(r, encode(Ask()))
                    r.told.release()
        sizes = [0]
        events = [waiting[thing] for thing in ready]
        for r, what in events:
            if what == "control":
                self._read_control(r)
            elif what == "output":
                sizes.append(self._read_output(r))
        for r, what in events:
            if what == "end":
                self._see_end(r)
        if 0 < max(sizes) < CHUNK and all(what == "output" for _, what in events):
            time.sleep(QUIET)

    def _read_control(self, r: _Process) -> None:
        assert r.control is not None
        try:
            data = r.control.recv_bytes()
        except (EOFError, OSError):
            r.control.close()
            r.control = None
            return
        message = decode(data)
        if isinstance(message, Stand):
            r.asked = False
            self._memory[r.number] = message.memory
        if isinstance(message, (Value, Failure, Shown, Done)):
            self._read_output(r, all_of_it=True)  # what was printed before it returned comes before what it returned
            r.done = not self._start.stays
        if isinstance(message, Done):
            r.busy = False
        self._link.send_encoded(data)
        self._let_leave()

    def _let_leave(self) -> None:
        """When the last rank is done, all may close their connections."""
        if self._leave_by is None and all(r.done or r.ended for r in self._ranks):
            self._leave_by = time.monotonic() + LAST_STEPS
            for r in self._ranks:
                with r.told:
                    _send(r, encode(Leave()))

    def _read_output(self, r: _Process, all_of_it: bool = False) -> int:
        """Pass on what is there now, which may be nothing; returns the size of the last piece."""
        size = 0
        while r.output is not None and r.output.poll(0):
            try:
                data = os.read(r.output.fileno(), CHUNK) if sys.platform != "win32" else r.output.recv_bytes()
            except (EOFError, OSError):
                data = b""
            size = len(data)
            if data:
                self._link.send(Output(r.number, data))
            else:
                r.output.close()
                r.output = None
            if not all_of_it:
                break
        return size

    def _see_end(self, r: _Process) -> None:
        """A rank's process is gone: end what it started, pass on what is left in its pipes, and say so."""
        r.process.join()
        with self._stopping:
            r.ended = True  # from here on its number may be another process's
        _end_group(r.process.pid)
        while r.control is not None and r.control.poll(0):
            self._read_control(r)
        self._read_output(r, all_of_it=True)
        for connection in (r.control, r.output):
            if connection is not None:
                connection.close()
        r.control = r.output = None
        crash = b""
        if r.crash.poll(0):
            try:
                crash = os.read(r.crash.fileno(), CHUNK) if sys.platform != "win32" else r.crash.recv_bytes()
            except (EOFError, OSError):
                pass  # it wrote nothing
        r.crash.close()
        call, exitcode, memory = bytes(r.last_call.value), r.process.exitcode or 0, ""
        if exitcode == -9 and not self._ending and limits.kills_for_memory() > self._short_of_memory:
            memory = limits.memory_in_words()
            if r.number in self._memory:
                memory += f"; this rank held {self._memory[r.number] >> 20:,} MB when it was last looked at"
        self._link.send(Ended(r.number, exitcode, crash.decode(errors="replace"), json.loads(call) if call else None, memory))
        self._let_leave()

    def _end_all(self, patience: float = PATIENCE) -> None:
        """End all ranks: politely first, where there is patience."""
        self._ending = True
        if patience and sys.platform != "win32":
            self._signal_all(signal.SIGTERM)
            deadline = time.monotonic() + patience
            while not all(r.ended for r in self._ranks) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._signal_all(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)

    def _signal_all(self, number: int, ranks: list[int] | None = None) -> None:
        with self._stopping:
            for r in self._ranks if ranks is None else [self._ranks[rank] for rank in ranks]:
                if not r.ended and r.process.pid:
                    if number in (signal.SIGTERM, signal.SIGINT) or not _end_group(r.process.pid):
                        try:
                            os.kill(r.process.pid, number)
                        except ProcessLookupError:
                            pass  # it ended by itself in this moment


def _send_start(r: _Process, control: Connection, data: bytes) -> None:
    try:
        control.send_bytes(data)
    except OSError:
        pass  # the rank died before it read its function; its end tells the story
    finally:
        r.told.release()


def _send(r: _Process, data: bytes) -> None:
    try:
        if r.control is not None:
            r.control.send_bytes(data)
    except OSError:
        pass  # it is dying, and its end is about to be seen


def _end_group(pid: int | None) -> bool:
    """Kill the process group that a rank made for itself and all that it started. False where there is none (yet)."""
    if pid is None or not hasattr(os, "killpg"):
        return False
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _adopt_orphans() -> None:
    """Linux: become the parent of whatever the ranks leave behind, also of processes that have left the rank's process group."""
    if sys.platform.startswith("linux"):
        PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants() -> None:
    """End all processes below this one. They cannot have new numbers meanwhile: this process is their parent and has not waited for them."""
    try:
        left = psutil.Process().children(recursive=True)
    except psutil.Error:
        return
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            pass  # gone by itself
    psutil.wait_procs(left, timeout=2)
