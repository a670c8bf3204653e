"""Inside a rank that stays: an IPython shell that runs what it is told, cell by cell.

IPython's own shell, without a terminal: names live on, the last expression is shown, top-level await and magics work, `display` shows figures
and HTML. What it would show goes to the notebook as messages; what is printed goes the way of all output.
"""

from __future__ import annotations

import base64
import builtins
import io
import os
import signal
import sys
import time
import types
import zlib
from typing import TYPE_CHECKING, Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

from ddpkit import payload
from ddpkit.messages import Cell, Done, Get, Output, Put, Shown, Value

if TYPE_CHECKING:
    from ddpkit.rank import Rank

LOOK = 64 << 20
"""Elements of a tensor that its fingerprint is made of, at most: looking must stay quick."""


def serve(rank: Rank) -> None:
    """Do what comes, until the process is ended."""
    from ddpkit.rank import failure, flush

    shell = _Shell.make(rank, sys.modules["__main__"])
    while True:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook interrupts cells, not ranks
        message: Any = rank.inbox.get()
        error: BaseException | None = None
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if isinstance(message, Cell):
                error = shell.run(message)
            elif isinstance(message, Get):
                rank.send(Value(rank.number, payload.pack_value(eval(message.expression, shell.user_ns))))
            elif isinstance(message, Put):
                fn, args = payload.unpack_call(message.payload)
                shell.user_ns.update(fn(*args))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as caught:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            error = caught
        flush()
        if error is not None:
            rank.send(failure(rank.number, "running the function", error, time.monotonic()))
        rank.send(Done(rank.number, message.number))


def warm() -> None:
    """In the forkserver: make a shell and let it go. The first one in a process takes 50 ms, any other one 5: much is loaded when it is needed."""

    class Nobody:
        number = 0

        def send(self, message: Any) -> None:
            pass

    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    backend = os.environ.get("MPLBACKEND")
    try:
        _Shell.make(Nobody(), types.ModuleType("ddpkit_warm")).run(Cell(0, "<warm>", "1"))
    finally:
        _Shell.clear_instance()
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        sys.modules.pop("ddpkit_warm", None)
        for name in ("display", "__IPYTHON__"):  # a shell leaves them for good, and ranks without one must not have them
            vars(builtins).pop(name, None)
        if backend is None:
            os.environ.pop("MPLBACKEND", None)


class _Stream(io.BufferedIOBase):
    """What Python code prints, as messages."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._rank, self._descriptor = rank, {"stdout": 1, "stderr": 2}[name]

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        self._rank.send(Output(self._rank.number, bytes(data)))
        return len(data)


class _Compiler(CachingCompiler):
    """Calls code by the name of the notebook's cell."""

    name = ""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.name or str(super().get_code_name(raw_code, transformed_code, number))


class _Publisher(DisplayPublisher):
    """Sends what `display` shows to the notebook."""

    rank = AnyTrait()

    def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        _show(self.rank, data)

    def clear_output(self, wait: bool = False) -> None:
        pass  # all output is kept


class _Hook(DisplayHook):
    """Sends the value of a cell's last expression to the notebook."""

    rank = AnyTrait()

    def write_output_prompt(self) -> None:
        pass

    def finish_displayhook(self) -> None:
        pass  # a terminal's empty line

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        _show(self.rank, format_dict)


def _show(rank: Rank, data: dict[str, Any]) -> None:
    from ddpkit.rank import flush

    flush()  # what was printed before comes before
    rank.send(Shown(rank.number, {kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()}))


class _Shell(InteractiveShell):
    """The shell of one rank."""

    compiler_class = Type(_Compiler)
    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)

    @classmethod
    def make(cls, rank: Any, module: types.ModuleType) -> _Shell:
        config = Config()
        config.HistoryManager.enabled = False  # no file, no thread
        config.InteractiveShell.colors = "nocolor"
        config.InteractiveShell.autocall = 0
        shell = cls.instance(config=config, user_module=module)
        for name in ("stdout", "stderr"):
            # In one stream with what is shown, so that all comes in order. What programs and C++ code write comes through the pipe.
            raw: Any = _Stream(rank, name)
            stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if os.environ.get("MPLBACKEND", "agg") == "agg":
            os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # loaded with the first figure
        tools: Any = shell
        tools.displayhook.rank = tools.display_pub.rank = rank
        text = tools.display_formatter.formatters["text/plain"]
        text.for_type_by_name("torch", "Tensor", _pretty_tensor)
        text.for_type_by_name("torch.nn.parameter", "Parameter", _pretty_tensor)
        return shell

    def init_virtualenv(self) -> None:
        """The rank's import path is the notebook's; nothing is to be added to it, or said about it."""

    def enable_gui(self, gui: Any = None) -> None:
        """A rank has no windows."""

    def run(self, cell: Cell) -> BaseException | None:
        """Run a cell; returns what ended it early, if something did."""
        tools: Any = self
        tools.compile.name = cell.name
        result = tools.run_cell(cell.source, store_history=True)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        """The notebook shows it, for all ranks together."""

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """The same."""

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """The same."""


InteractiveShellABC.register(_Shell)


def _pretty_tensor(tensor: Any, printer: Any, cycle: bool) -> None:
    """The values, and then what tells tensors apart at a glance: dtype, shape, device and a fingerprint of the bits."""
    printer.text(f"{tensor!r}\n{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {tensor.device} #{fingerprint(tensor)}")


def fingerprint(tensor: Any) -> str:
    """Four hexadecimal digits that are equal for equal bits."""
    import torch

    values = tensor.detach().flatten()[:LOOK].cpu().contiguous()
    if not values.numel():
        return "0000"
    return f"{zlib.crc32(values.view(torch.uint8).numpy()) & 0xFFFF:04x}"
