"""The notebook's side of a run: gets an agent, sends it the work, hears what comes back, and makes sure that nothing stays.

No torch here: the notebook's process does not load it for the kit's sake. No display here either.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from ddpkit.errors import LaunchFailed
from ddpkit.messages import Link, Message, Start, Stop

CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")
PATIENCE = 5.0
"""Seconds that an agent has to end its ranks and itself. It needs about one where a rank ignores SIGTERM."""

_RUN_FORKSERVER = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from ddpkit.forkserver import main; main()"
_RUN_AGENT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from ddpkit.agent import main_on_stdio; main_on_stdio()"
INSIDE = "DDPKIT_INSIDE"
"""Set in the environment of processes that the kit starts for itself: there, importing ddpkit must not start more of them."""


class Forkserver:
    """This process's line to its forkserver; starts it when it is first wanted, and again when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._errors: IO[Any] | None = None

    def warm(self) -> None:
        """Start the forkserver if it does not run. Returns at once; it loads torch meanwhile."""
        with self._lock:
            self._ensure()

    @property
    def pid(self) -> int | None:
        """Its process id; None where none runs."""
        return self._process.pid if self._process is not None and self._owner == os.getpid() and self._process.poll() is None else None

    def agent(self) -> Link:
        """A link to a new agent, a copy of the forkserver."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            line = self._ensure()
            try:
                socket.send_fds(line, [b"+"], [theirs.fileno()])
            except OSError as error:
                raise LaunchFailed(f"the forkserver could not be reached ({error}).\n{self._explanation()}") from None
        return Link.over(ours)

    def why_gone(self) -> str:
        """What the forkserver said at its end; empty where it is alive."""
        with self._lock:
            return self._explanation()

    def close(self) -> None:
        """End the forkserver; running agents go on."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                assert self._line is not None
                self._line.close()  # it ends when its line does
                try:
                    self._process.wait(2)
                except subprocess.TimeoutExpired:  # it is still loading torch
                    self._process.kill()
                    self._process.wait()
            self._forget()

    def _ensure(self) -> socket.socket:
        if self._owner != os.getpid():
            self._forget()  # we are a forked copy of the process that it belongs to
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._line is None:
            self._start()
        assert self._line is not None
        return self._line

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile(prefix="ddpkit-")  # noqa: SIM115 (lives as long as the process)
        environment = os.environ | {INSIDE: "forkserver", "OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads, and threads do not survive a fork
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN_FORKSERVER, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # out of reach of the Ctrl-C that a kernel or a terminal sends to its process group
            )
        self._line, self._owner = ours, os.getpid()

    def _explanation(self) -> str:
        if self._process is None or self._errors is None or self._line is None:
            return ""
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            return ""
        self._errors.seek(0)
        said = b""
        self._line.setblocking(False)
        try:
            said = self._line.recv(1 << 20)
        except OSError:
            pass
        text = (said.lstrip(b"RF") + self._errors.read()).decode(errors="backslashreplace").strip()
        return f"The forkserver ended with status {self._process.returncode}" + (f" and said:\n{text}" if text else ".")

    def _forget(self) -> None:
        for thing in (self._line, self._errors):
            if thing is not None:
                thing.close()
        self._process = self._line = self._errors = None


forkserver = Forkserver()
atexit.register(forkserver.close)


def _agent_as_child(errors: IO[Any]) -> tuple[Link, subprocess.Popen[bytes]]:
    """An agent as a process of its own, where there is no fork (Windows). It loads torch first."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN_AGENT, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | {INSIDE: "agent"},
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    assert process.stdout is not None and process.stdin is not None
    return Link(process.stdout, process.stdin), process  # type: ignore[arg-type]


def _temporary_folder() -> str:
    """A new folder that only this user can read. In memory, where that can be had: a file for each rank takes 2 ms on a disk."""
    try:
        return tempfile.mkdtemp(prefix=f"ddpkit-{os.getpid()}-", dir="/dev/shm")
    except OSError:
        return tempfile.mkdtemp(prefix=f"ddpkit-{os.getpid()}-")


class Interrupts:
    """Ctrl-C, or the notebook's stop button, while a run is followed. A context manager.

    Raised at just any line, as Python does it, a second KeyboardInterrupt would break the clean-up after the first. So one is raised where the
    run's events are read, and nowhere else, however often the button is pressed. One that comes too late for that is raised at the end.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._raised = False
        self._since = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # no other is ever interrupted
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if kind is None and self.pressed:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if the button was pressed."""
        if self.pressed:
            self._raised = True  # what follows is clean-up
            raise KeyboardInterrupt

    def _press(self, *_: Any) -> None:
        now = time.monotonic()
        if not self.pressed:
            self.pressed, self._since = True, now
        if now - self._since > PATIENCE and not self._raised:
            raise KeyboardInterrupt  # nobody reads events: code of the user's own runs here and does not end, while a value is unpickled


class Job:
    """One run's agent, seen from the notebook. A context manager: leaving it ends whatever still runs, whatever happened."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[Any] | None = None
        self._link: Link | None = None
        self._reader: threading.Thread | None = None
        self._folder = ""
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._gone = threading.Event()

    def __enter__(self) -> Job:
        try:
            if CAN_FORK:
                self._link = forkserver.agent()
            else:
                self._errors = tempfile.TemporaryFile(prefix="ddpkit-")
                self._link, self._process = _agent_as_child(self._errors)
            self._folder = _temporary_folder()
            self._reader = threading.Thread(target=self._read, args=(self._link,), name="ddpkit-run", daemon=True)
            self._reader.start()
            try:
                self._link.send(replace(self._start, folder=self._folder))
            except OSError:
                pass  # it died; `events` ends, and the caller asks `why_gone`
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._gone.is_set():
            self.stop()
            self._gone.wait(PATIENCE)
        self._close()

    def _close(self) -> None:
        # Where the agent itself does not answer, hanging up is what ends it: its ranks die with it.
        if self._link is not None:
            self._link.hang_up()
            if self._reader is not None:
                self._reader.join(PATIENCE)
            self._link.close()
        if self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._errors is not None:
            self._errors.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, link: Link) -> None:
        while (message := link.receive()) is not None:
            self._messages.put(message)
        self._gone.set()
        self._messages.put(None)

    def events(self, tick: float = 0.1) -> Iterator[Message | None]:
        """What comes from the run, as it comes, and None every `tick` seconds in which nothing does. Ends with the agent."""
        due = time.monotonic() + tick
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + tick
                yield None
                continue
            if message is None:
                return
            yield message

    def stop(self) -> None:
        """Ask the agent to end all ranks. `events` goes on until they are gone."""
        self.tell(Stop())

    def tell(self, message: Message) -> None:
        """Send the agent a message."""
        assert self._link is not None
        try:
            self._link.send(message)
        except OSError:
            pass  # all are gone already, and `events` says so

    def why_gone(self) -> str:
        """Why the agent is gone, where that is known."""
        if self._errors is None:
            return forkserver.why_gone()
        self._errors.seek(0)
        return str(self._errors.read().decode(errors="backslashreplace").strip())
