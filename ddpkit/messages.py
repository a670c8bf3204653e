"""What the notebook, the agent and the ranks say to each other.

Every message is a small frozen dataclass. On the wire it is a JSON header, then (for those that carry one) raw bytes:

    | header length, 4 bytes | header: ["Output", {"rank": 1}] | payload |

JSON, not pickle: whoever only passes a message on (the agent) runs nothing that a rank has written. The payloads of `Start`, `Value` and
`Failure` are pickles, and are opened only where their objects are wanted: in the rank, in the notebook. All channels are pipes or socket
pairs without a name that a process inherits from its parent; nothing is ever read from a socket that others can connect to.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!I")
_FRAME = struct.Struct("!Q")


@dataclass(frozen=True)
class Start:
    """Notebook to agent: start this many ranks, and run this in each."""

    nprocs: int
    start_method: str
    environment: dict[str, str]
    """The notebook's `os.environ` at the moment of the call. A forkserver has the one of the moment it was started."""
    overrides: dict[str, str]
    """What the caller gave as `env`; wins over what the kit sets."""
    cwd: str
    sys_path: list[str]
    argv: list[str]
    sources: dict[str, list[str]]
    """Source lines of cells by file name, for tracebacks: a cell is on no disk."""
    threads: int
    timeout: float
    payload: bytes = field(repr=False)
    stays: bool = False
    """The ranks live on and do what they are told, cell by cell. `payload` is empty then."""
    folder: str = ""
    """A private folder for the files that `multiprocessing` makes in the agent and the ranks. It is made, and goes, with the run."""


@dataclass(frozen=True)
class Stop:
    """Notebook to agent: end all ranks now."""


@dataclass(frozen=True)
class Deliver:
    """Notebook to agent: hand a message on to these ranks. Only ranks that stay are told more than one thing."""

    ranks: list[int]
    payload: bytes = field(repr=False)
    """The message, encoded."""


@dataclass(frozen=True)
class Interrupt:
    """Notebook to agent: interrupt what these ranks run, as Ctrl-C does."""

    ranks: list[int]


@dataclass(frozen=True)
class Cell:
    """Notebook to a rank that stays: run this code."""

    number: int
    """Given back in `Done`."""
    name: str
    """Stands for a file's name in tracebacks: `<Cell In[3]>`."""
    source: str


@dataclass(frozen=True)
class Get:
    """Notebook to a rank that stays: what is the value of this expression?"""

    number: int
    expression: str


@dataclass(frozen=True)
class Put:
    """Notebook to a rank that stays: these names have these values now."""

    number: int
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class Shown:
    """A rank that stays to notebook: something to show, by MIME type; bytes as base64."""

    rank: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """A rank that stays to notebook: that is done, well or not."""

    rank: int
    number: int


@dataclass(frozen=True)
class Leave:
    """Agent to rank: everybody is done, you may close your connections and end."""


@dataclass(frozen=True)
class Ask:
    """Agent to rank: where do you stand?"""


@dataclass(frozen=True)
class Started:
    """Agent to notebook: all ranks are started."""

    pids: list[int]
    gpus: int = 0
    """How many GPUs this machine has for them."""


@dataclass(frozen=True)
class Output:
    """What a rank, or a process that it started, wrote to stdout or stderr, as it came."""

    rank: int
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class Metrics:
    """Numbers that a rank gave to `ddpkit.log`."""

    rank: int
    numbers: dict[str, float | int | str | bool | None]


@dataclass(frozen=True)
class Value:
    """What a rank's function returned."""

    rank: int
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank's function."""

    rank: int
    stage: str
    """What the rank was doing: "running the function", "unpickling the function", …"""
    errors: list[dict[str, Any]]
    """The exception's chain, the first cause first. Each has `type`, `text` and `frames`, and each frame `[file, line, function, source]`."""
    moment: float
    """`time.monotonic()` when it was raised. Ranks on one machine share that clock."""
    last_call: dict[str, Any] | None = None
    """The last collective that the rank called."""
    payload: bytes = field(repr=False, default=b"")
    """The exception, pickled; empty where it cannot be."""


@dataclass(frozen=True)
class Stand:
    """Where a rank stands; its answer to `Ask`."""

    rank: int
    moment: float
    """`time.monotonic()` of the answer."""
    cpu: float
    """Processor seconds that the process has used so far, all threads."""
    waits: bool
    """Its main thread waits for other ranks."""
    collective: dict[str, Any] | None
    """The collective that it waits in; None where it waits in `init_process_group`. Without torch's hooks only its `op` is known."""
    frames: list[list[Any]]
    """Where it is: the user's own frames, as in `Failure`."""
    called: dict[str, int]
    """How many collectives it has called, by group."""
    memory: int = 0
    """Bytes of memory that its process holds (resident)."""
    joins: list[int] = field(default_factory=list)
    """RANK and WORLD_SIZE, where it waits in `init_process_group`."""


@dataclass(frozen=True)
class Calls:
    """All collectives that a rank has called, at its end."""

    rank: int
    groups: dict[str, Any]
    """By group: `first`, the number of the first one that is remembered; `kinds`, the different ones; `sequence`, an index into them for each."""


@dataclass(frozen=True)
class Weights:
    """The parameters of a rank's DDP models, at its end."""

    rank: int
    models: list[dict[str, Any]]
    """Each has `number` (in the order in which they were wrapped), `ranks` (of its process group), `name` (its class) and `parameters`: by name,
    the sum of all bits, the norm and the mean."""


@dataclass(frozen=True)
class Ended:
    """Agent to notebook: a rank's process is gone, and this was the last to come from it."""

    rank: int
    exitcode: int
    """As `multiprocessing` gives it: the exit status, or minus the number of the signal."""
    crash: str = ""
    """What Python's faulthandler wrote in the moment of the crash: the stack of each thread."""
    last_call: dict[str, Any] | None = None
    """The last collective that it called."""
    memory: str = ""
    """Where the system killed it for want of memory: the limit and the use, in words."""


@dataclass(frozen=True)
class Trouble:
    """Agent to notebook: the ranks could not be started or watched."""

    text: str


Message = (
    Start
    | Stop
    | Deliver
    | Interrupt
    | Cell
    | Get
    | Put
    | Shown
    | Done
    | Leave
    | Ask
    | Started
    | Output
    | Metrics
    | Value
    | Failure
    | Stand
    | Calls
    | Weights
    | Ended
    | Trouble
)
_KINDS: dict[str, Callable[..., Message]] = {
    kind.__name__: kind
    for kind in (
        Start,
        Stop,
        Deliver,
        Interrupt,
        Cell,
        Get,
        Put,
        Shown,
        Done,
        Leave,
        Ask,
        Started,
        Output,
        Metrics,
        Value,
        Failure,
        Stand,
        Calls,
        Weights,
        Ended,
        Trouble,
    )
}


def encode(message: Message) -> bytes:
    """The message as bytes."""
    names = [f.name for f in fields(message) if f.name != "payload"]
    header = json.dumps([type(message).__name__, {name: getattr(message, name) for name in names}]).encode()
    return b"".join((_LENGTH.pack(len(header)), header, getattr(message, "payload", b"")))


def decode(data: bytes) -> Message:
    """The message that `encode` made these bytes of."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    name, values = json.loads(data[_LENGTH.size : start])
    if "payload" in _KINDS[name].__dataclass_fields__:  # type: ignore[attr-defined]
        values["payload"] = data[start:]
    return _KINDS[name](**values)


class Link:
    """Messages in both directions over a pair of byte streams: the notebook at one end, an agent at the other.

    Byte streams, since they are what all platforms have: a socket pair where the forkserver hands one on, a child's stdin and stdout elsewhere.
    """

    def __init__(self, reader: BinaryIO, writer: BinaryIO, stream: socket.socket | None = None) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = stream
        self._lock = threading.Lock()

    @classmethod
    def over(cls, stream: socket.socket) -> Link:
        """A link over one end of a socket pair, which it owns from now on."""
        return cls(stream.makefile("rb"), stream.makefile("wb"), stream)

    def send(self, message: Message) -> None:
        """Send a message; raises OSError where the other end is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send what `encode` gave, as it is."""
        with self._lock:
            self._writer.write(_FRAME.pack(len(data)))
            self._writer.write(data)
            self._writer.flush()

    def receive(self) -> Message | None:
        """The next message, waiting for it; None when the other end is gone."""
        try:
            head = self._reader.read(_FRAME.size)
            if len(head) < _FRAME.size:
                return None
            (length,) = _FRAME.unpack(head)
            data = self._reader.read(length)
        except (OSError, ValueError):  # ValueError: closed by another thread of ours
            return None
        return decode(data) if len(data) == length else None

    def descriptors(self) -> set[int]:
        """The file descriptors that this end of the link holds open."""
        return {self._reader.fileno(), self._writer.fileno()}

    def hang_up(self) -> None:
        """End the link at once, from any thread: the other end, and a `receive` that waits in another thread here, see that it is over."""
        try:
            if self._stream is not None:
                self._stream.shutdown(socket.SHUT_RDWR)
            else:
                self._writer.close()
        except OSError:
            pass  # the other end hung up first

    def close(self) -> None:
        """Give the descriptors back. No other thread may be waiting in `receive`."""
        for stream in (self._writer, self._reader, self._stream):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass  # bytes were still on their way to somebody who is gone
