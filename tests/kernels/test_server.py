"""A kernel under a real Jupyter server: restarting it, and closing the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient

from tests.leftovers import still_alive

LONG = """
import ddpkit, time

def long(rank):
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open(f"started {rank}", "w").close()
    time.sleep(600)

ddpkit.spawn(long)
"""


class Server:
    """A Jupyter server with one kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        runtime = folder / "runtime"
        runtime.mkdir()
        environment = os.environ | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_DATA_DIR": str(folder)}
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--port=0", "--ip=127.0.0.1", "--allow-root", "--IdentityProvider.token="]
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [*command, f"--ServerApp.root_dir={folder}", "--ServerApp.disable_check_xsrf=True"],
                env=environment,
                cwd=folder,  # the kernel's as well
                stdout=log,
                stderr=log,
            )
        info = wait_for(lambda: next((json.loads(p.read_text()) for p in runtime.glob("jpserver-*.json") if p.stat().st_size), None))
        self.url = info["url"]
        wait_for(lambda: self._ask("GET", "api") or True)
        self.kernel = json.loads(self._ask("POST", "api/kernels"))["id"]
        self.client = BlockingKernelClient(connection_file=str(wait_for(lambda: next(iter(runtime.glob(f"kernel-{self.kernel}.json")), None))))
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", method=method, data=b"{}" if method == "POST" else None)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def restart(self) -> None:
        self._ask("POST", f"api/kernels/{self.kernel}/restart")

    def start_ranks(self) -> list[psutil.Process]:
        """Run a cell with long ranks; returns all processes of the kernel when they are at work."""
        self.client.execute(LONG)
        wait_for(lambda: all((self.folder / f"started {rank}").exists() for rank in range(2)) or None)
        (kernel,) = psutil.Process(self.process.pid).children()
        return [kernel, *kernel.children(recursive=True)]


def wait_for(what, seconds=60.0):
    """What it returns, once that is not None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if (found := what()) is not None:
                return found
        except (OSError, ValueError):
            pass  # not there yet, or half written
        time.sleep(0.02)
    raise TimeoutError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.client.stop_channels()
    if running.process.poll() is None:
        running.process.terminate()
        running.process.wait(30)


def test_closing_the_server_ends_all_ranks(server):
    started = server.start_ranks()
    assert len(started) >= 7  # the kernel, the forkserver, an agent, two ranks, two children of theirs
    server.process.send_signal(signal.SIGTERM)
    assert still_alive(started, 20) == []


def test_restarting_the_kernel_ends_all_ranks_and_the_next_call_works(server):
    started = server.start_ranks()
    server.restart()
    assert still_alive(started, 10) == []
    server.client.wait_for_ready(timeout=60)
    reply = server.client.execute_interactive("import ddpkit\nassert ddpkit.spawn(lambda rank: rank).values == [0, 1]", timeout=60)
    assert reply["content"]["status"] == "ok", reply["content"]
