"""The digits that the lessons train on: 10,000 of MNIST's come with the kit, and the whole set can be fetched.

    from torchvision import datasets
    from ddpkit.data import mnist_root

    train_set = datasets.MNIST(mnist_root(), train=True)     # 8,000 digits, no network

The files are unpacked once per user, and looked at on every call: whatever damages them, the next call mends it. All ranks may call at the
same time. A file appears under its name only when it is complete (written beside it, then renamed), so that no rank reads half of one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = "DDPKIT_DATA"
"""Environment variable: the folder to keep data in, instead of the user's cache folder."""
PACKED = Path(__file__).parent / "mnist10k"
SHA256 = {
    "train-images-idx3-ubyte": "57cc05c587eb89ce11216d3ce30bd3cc072b293cf58040c61baed47242f34fe6",
    "train-labels-idx1-ubyte": "1598fd38e5a6b0e8c00daf6e922c7a4eb1f601fb52898e35d354126248d2e319",
    "t10k-images-idx3-ubyte": "1311050d63fd605c7d48a729a00cfe2575e7d59c24a0433871d0199f8b7dc191",
    "t10k-labels-idx1-ubyte": "ed0a7c091b81c6d7541e7e48ff1d4fda174fd5f769977ad62fa0755b3764bb89",
}
"""Of the 10,000 digits' files, unzipped."""
FULL_SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
"""Bytes of the whole set's files, unzipped. torchvision checks the MD5 of what it downloads, but not whether the unzipped files stay whole."""
SILENCE = 45.0
"""Seconds that a download may bring nothing. A slow one that does bring something goes on."""
POLL = 0.1
"""Seconds between two looks at a download."""

_DOWNLOAD = """
import json, socket, sys
sys.path[:] = json.loads(sys.argv[1])
socket.setdefaulttimeout(20)  # seconds for one answer; torchvision sets none, and tries a second mirror when the first one fails
from torchvision.datasets import MNIST
MNIST(sys.argv[2], download=True)
"""


def mnist_root(*, full: bool = False) -> str:
    """The folder to give to `torchvision.datasets.MNIST(root, train=...)`; what it reads is there and whole when this returns.

    Args:
        full: False: 10,000 genuine MNIST digits that come with ddpkit (8,000 in the training set, 2,000 in the test set), no network needed.
            True: the whole MNIST (60,000 and 10,000), downloaded with torchvision's own downloader where it is not there yet (11 MB).

    Returns:
        A folder in the user's cache: `$DDPKIT_DATA` where that is set, else what the platform has for this, such as `~/.cache/ddpkit`. Where
        nothing can be written there, a folder for temporary files.

    Raises:
        ConnectionError: the whole set is wanted, is not there, and cannot be downloaded.
        OSError: the files can be written nowhere, or ddpkit's own copy is damaged.
    """
    name, is_whole = ("mnist", _is_whole_set) if full else ("mnist10k", _is_ours)
    roots = [cache / name for cache in _caches()]
    for root in roots:
        if all(is_whole(_raw(root) / file) for file in SHA256):
            return str(root)
    problems = []
    for root in roots:
        try:
            _raw(root).mkdir(parents=True, exist_ok=True)
            if full:
                _fetch(root)
            else:
                _unpack(_raw(root))
            return str(root)
        except (ConnectionError, _Damaged):
            raise
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
    raise OSError(
        f"The MNIST files can be written nowhere ({'; '.join(problems)}). Set the environment variable {CACHE} to a folder that you may write to."
    )


class _Damaged(OSError):
    """ddpkit's own copy of the digits is not what it was when it was made."""


def _caches() -> Iterator[Path]:
    """Where data may be kept, best first."""
    if os.environ.get(CACHE):
        yield Path(os.environ[CACHE]).expanduser().absolute()
    else:
        try:
            yield _users_cache() / "ddpkit"
        except RuntimeError:
            pass  # a container's user may have no home folder
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()).absolute() / f"ddpkit-{user}"


def _users_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"  # the XDG specification: a relative path is ignored


def _raw(root: Path) -> Path:
    """Where torchvision looks for the unzipped files."""
    return root / "MNIST" / "raw"


def _is_ours(file: Path) -> bool:
    """Whether a file of the 10,000 digits is there and whole. All four together take 10 ms."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() == SHA256[file.name]
    except OSError:
        return False


def _is_whole_set(file: Path) -> bool:
    """Whether a file of the whole set is there and has its size."""
    try:
        return file.stat().st_size == FULL_SIZES[file.name]
    except OSError:
        return False


def _unpack(raw: Path) -> None:
    for name, checksum in SHA256.items():
        if _is_ours(raw / name):
            continue
        packed = PACKED / f"{name}.gz"
        try:
            data = gzip.decompress(packed.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise _Damaged(f"{packed} cannot be read ({error}). Install ddpkit again.") from error
        if hashlib.sha256(data).hexdigest() != checksum:
            raise _Damaged(f"{packed} is damaged: its content is not the digits that ddpkit was made with. Install ddpkit again.")
        beside = raw / f"{name}.{secrets.token_hex(8)}"
        try:
            beside.write_bytes(data)
            os.replace(beside, raw / name)
        except OSError:
            # Windows does not replace a file that another rank reads: then that rank has it, whole.
            if not _is_ours(raw / name):
                raise
        finally:
            beside.unlink(missing_ok=True)


def _fetch(root: Path) -> None:
    """Download the whole set, or wait for the process that does."""
    silence = _Silence(root)
    waited = False
    with open(root / "lock", "a") as lock:
        # The system frees a lock when the process that holds it dies, so that none is ever left behind.
        while not _try_lock(lock.fileno()):
            waited = True
            # One that is silent gives up by itself a moment later, and frees the lock.
            if silence.lasts(SILENCE + 5):
                raise _no_download(root, f"another process downloads it, and has got nothing in {SILENCE:.0f} seconds")
            time.sleep(POLL)
        if all(_is_whole_set(_raw(root) / file) for file in FULL_SIZES):
            return
        if waited:  # a try of our own after each other rank's would take minutes
            raise _no_download(root, "another process has just tried, without success")
        for left in root.glob("download-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        _download(root)


def _download(root: Path) -> None:
    """Download with torchvision into a folder beside, and move the files into place.

    In a process of its own: only that can be ended when a name server or a proxy does not answer, and it leaves this process's default
    timeout of sockets alone.
    """
    with _folder_in(root) as folder, tempfile.TemporaryFile() as said:
        raw = _raw(folder)
        raw.mkdir(parents=True)
        for packed in _raw(root).glob("*.gz"):  # put there by hand: torchvision takes those whose MD5 is right
            shutil.copy(packed, raw)
        process = subprocess.Popen(
            [sys.executable, "-c", _DOWNLOAD, json.dumps(sys.path), str(folder)], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        silence = _Silence(root)
        try:
            while process.poll() is None:
                if silence.lasts(SILENCE):
                    raise _no_download(root, f"nothing came in {SILENCE:.0f} seconds")
                try:
                    process.wait(POLL)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="backslashreplace").strip()
        if process.returncode != 0:
            # The end of a traceback. torchvision's own error has several lines: what it tried, and what it got.
            _, found, tried = text.rpartition("RuntimeError: ")
            raise _no_download(root, tried if found else text.rpartition("\n")[2])
        for name, size in FULL_SIZES.items():
            if not _is_whole_set(raw / name):
                raise _no_download(root, f"{name} came with a size other than {size} bytes")
            os.replace(raw / name, _raw(root) / name)


@contextmanager
def _folder_in(root: Path) -> Iterator[Path]:
    """A new folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="download-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Silence:
    """Tells for how long a download has brought nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._size = -1
        self._since = time.monotonic()

    def lasts(self, seconds: float) -> bool:
        size = 0
        for file in self._root.glob("download-*/MNIST/raw/*"):
            try:
                size += file.stat().st_size
            except OSError:
                pass  # moved into place in this moment
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since >= seconds


def _try_lock(descriptor: int) -> bool:
    """Lock an open file against other processes; False where one of them has it."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a network drive without locks: ranks may then download twice, which is slow and does no harm
    return True


def _no_download(root: Path, reason: str) -> ConnectionError:
    return ConnectionError(
        f"The whole MNIST could not be downloaded with torchvision: {reason}\n"
        "What to do: use mnist_root(), 10,000 of its digits that come with ddpkit and need no network. "
        f"Or put its four files ({', '.join(FULL_SIZES)}; zipped as .gz will do) into {_raw(root)} and call this again."
    )
