"""The forkserver: a process that has torch loaded and does nothing but make copies of itself. One for each notebook.

It is started in the background when ddpkit is imported, while the learner still reads. Each run gets a copy as its agent (see agent.py), and
the agent's ranks are copies of that: they share torch's memory, and start in milliseconds instead of loading torch again.

Why not Python's own forkserver (`multiprocessing.forkserver`)? There the ranks are children of the server. A rank's agent could not adopt what
the rank leaves behind, and could not be sure to end with it. It is also one per process and shared with everybody: its preloads would come
into the DataLoader workers of the user's notebook, and theirs into our ranks.

What keeps copies safe: this process has one thread, no open files but its line to the notebook, and has never touched a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # DistributedDataParallel's constructor imports it: 890 modules, 1.3 s
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.optim",
    "torchvision.datasets",
    "torchvision.transforms",
    "cloudpickle",
    "ddpkit.agent",
    "ddpkit.metrics",
    "ddpkit.shell",  # with IPython
)
READY, FAILED = b"R", b"F"
HUGE = 2 << 20
"""Bytes of a huge page on x86-64 and most of the others."""
PIECE = 32 << 20
"""Bytes that are moved to huge pages between two looks for a request."""


def main() -> None:
    """Serve the notebook at the socket that was given as stdin, until it is gone."""
    notebook = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.close(devnull)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = json.loads(sys.argv[1])
    try:
        for name in PRELOAD:
            importlib.import_module(name)
    except BaseException:
        notebook.sendall(FAILED + traceback.format_exc().encode(errors="backslashreplace"))
        return
    from ddpkit import shell

    shell.warm()
    gc.collect()
    gc.freeze()  # the collector would write into every object it looks at, and with that copy each page in each rank
    notebook.sendall(READY)
    _serve(notebook, _large_memory())


def _serve(notebook: socket.socket, pieces: list[tuple[int, int]]) -> None:
    parent = os.getppid()
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the end of a child wakes us by wakeup_fd
    while os.getppid() == parent:
        # The time limit is for the one case in which the line stays open without a notebook: a copy of the notebook's process holds it.
        ready, _, _ = select.select([notebook.fileno(), wake_reader], [], [], 0 if pieces else 2.0)
        if pieces and not ready:
            _use_huge_pages(*pieces.pop())
        if wake_reader in ready:
            os.read(wake_reader, 4096)
        _reap()
        if notebook.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(notebook, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                notebook.close()
                os.close(wake_reader)
                os.close(wake_writer)
                _be_agent(descriptors[0])
            os.close(descriptors[0])


def _large_memory() -> list[tuple[int, int]]:
    """Where this process's large pieces of memory without a file are: (address, size) in bytes, cut so that each takes some 50 ms below."""
    pieces: list[tuple[int, int]] = []
    if not sys.platform.startswith("linux"):
        return pieces
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, rights, _, _, _, *name = line.split()
            start, end = (-(-int(a, 16) // HUGE) * HUGE for a in addresses.split("-"))
            if rights.startswith("rw") and name in ([], ["[heap]"]):
                pieces += [(at, min(PIECE, end - HUGE - at)) for at in range(start, end - HUGE, PIECE)]
    return pieces


def _use_huge_pages(address: int, size: int) -> None:
    """Ask Linux to hold a piece of our memory in pages of 2 MB instead of 4 KB.

    A fork copies the list of all pages, and the end of a process walks it again: 9 and 11 ms here with small pages, 2 and 3 ms with huge ones
    (340 MB without a file, Linux 6.18). The memory stays shared: a rank that writes into a huge page gets a copy of the 4 KB it writes.
    Linux before 6.1 refuses, and nothing is lost.
    """
    MADV_COLLAPSE = 25  # <asm-generic/mman-common.h>; unlike MADV_HUGEPAGE it leaves no mark by which the ranks' copies would be collapsed too
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    madvise(address, size, MADV_COLLAPSE)


def _be_agent(descriptor: int) -> None:
    """In the copy: serve one run, and end without the forkserver's own clean-up."""
    try:
        from ddpkit import agent
        from ddpkit.messages import Link

        agent.main(Link.over(socket.socket(fileno=descriptor)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main()
