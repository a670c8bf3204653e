"""Real Jupyter kernels for tests."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.manager import start_new_kernel


@dataclass
class Cell:
    """What a cell did."""

    number: int = 0
    """As the notebook shows it: In [number]."""
    stream: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: str | None = None
    evalue: str | None = None
    traceback: str = ""
    seconds: float = 0.0

    @property
    def shown(self) -> str:
        """All text that the cell put into the notebook."""
        return self.stream + "\n".join(d.get("text/plain", "") for d in self.displays)


class Kernel:
    """Runs cells one after the other, as a notebook does."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __enter__(self) -> Kernel:
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60, **self._options)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def start(self, code: str, *, allow_stdin: bool = False) -> str:
        """Begin to run a cell; `finish` waits for it."""
        return str(self.client.execute(code, allow_stdin=allow_stdin))

    def run(self, code: str, *, allow_stdin: bool = False, timeout: float = 120) -> Cell:
        """Run a cell. `allow_stdin` is what front ends with a person before them send, and nbval does not."""
        return self.finish(self.start(code, allow_stdin=allow_stdin), timeout=timeout)

    def finish(self, message_id: str, *, timeout: float = 120, until: str | None = None) -> Cell:
        """Collect what a cell does until it is done; with `until`, until it has shown that text (call again for the rest)."""
        cell, began = Cell(), time.monotonic()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, began + timeout - time.monotonic()))
            except Empty:
                raise TimeoutError(f"the cell is not done after {timeout} s; so far: {cell}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content, kind = message["content"], message["msg_type"]
            if kind == "execute_input":
                cell.number = content["execution_count"]
            elif kind == "stream":
                cell.stream += content["text"]
            elif kind == "display_data":
                cell.displays.append(content["data"])
            elif kind == "update_display_data":
                cell.updates.append(content["data"])
            elif kind == "execute_result":
                cell.result = content["data"]
            elif kind == "error":
                cell.error, cell.evalue = content["ename"], content["evalue"]
                cell.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                cell.seconds = time.monotonic() - began
                return cell
            if until is not None and until in cell.shown + "".join(str(u) for u in cell.updates):
                return cell

    def check(self, code: str, **options: Any) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(code, **options)
        assert cell.error is None, cell.traceback
        return cell
