"""The digits load with torchvision as it is, offline, from all ranks at once, whatever has happened to the files."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchvision import datasets

import ddpkit
from ddpkit import data

FILES = sorted(data.SHA256)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache, and an empty folder for temporary files: the user's own are not touched."""
    folder = tmp_path / "cache"
    (tmp_path / "temp").mkdir()
    monkeypatch.setenv(data.CACHE, str(folder))
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "temp"))
    return folder


def raw(root) -> Path:
    return Path(root) / "MNIST" / "raw"


def checksums(root) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in raw(root).iterdir()}


def whole_set(root) -> None:
    """Files that have the sizes of the whole set's, without the digits."""
    raw(root).mkdir(parents=True)
    for name, size in data.FULL_SIZES.items():
        with open(raw(root) / name, "wb") as file:
            file.truncate(size)


def torchvision_that(monkeypatch, tmp_path, does: str) -> Path:
    """Put a torchvision on the path whose MNIST does this; returns a file that gets a line for each download."""
    calls = tmp_path / "calls"
    package = tmp_path / "fake" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(
        "import pathlib, threading\n"
        f"SIZES = {data.FULL_SIZES!r}\n"
        "def MNIST(root, download):\n"
        f"    open({str(calls)!r}, 'a').write('called\\n')\n"
        "    raw = pathlib.Path(root, 'MNIST', 'raw')\n"
        f"    {does}\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    return calls


BRING = "[open(raw / name, 'wb').truncate(size) for name, size in SIZES.items()]"


@pytest.fixture
def no_network(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


def test_torchvision_loads_8000_and_2000_digits(cache):
    root = data.mnist_root()
    assert Path(root).parent == cache
    train, test = datasets.MNIST(root, train=True), datasets.MNIST(root, train=False)
    assert (len(train), len(test)) == (8000, 2000)
    assert train.data.shape == (8000, 28, 28)
    assert train[0][0].size == (28, 28)
    assert train.targets.bincount().tolist() == [784, 882, 805, 828, 789, 679, 811, 882, 755, 785]
    assert test.targets.bincount().tolist() == [217, 245, 186, 204, 191, 184, 203, 188, 189, 193]


def test_files_are_the_ones_that_the_readme_names():
    root = data.mnist_root()
    assert checksums(root) == data.SHA256
    readme = (data.PACKED / "README.md").read_text()
    for file in raw(root).iterdir():
        assert f"| `{file.name}` | {file.stat().st_size:,} | `{data.SHA256[file.name]}` |" in readme


def test_torch_is_not_loaded(tmp_path):
    code = "import sys, ddpkit.data as d; d.mnist_root(); sys.exit(any(m.startswith('torch') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"DDPKIT_INSIDE": "test"}).returncode == 0


def cut(file):
    os.truncate(file, 1000)


def empty(file):
    file.write_bytes(b"")


def delete(file):
    file.unlink()


def spoil(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, empty, delete, spoil])
def test_damaged_file_is_mended(name, damage):
    root = data.mnist_root()
    damage(raw(root) / name)
    assert data.mnist_root() == root
    assert checksums(root) == data.SHA256


def test_whole_files_are_not_written_again(monkeypatch):
    root = data.mnist_root()
    monkeypatch.setattr(data, "_unpack", None)
    assert data.mnist_root() == root


def test_four_ranks_at_once_on_an_empty_cache(start_method):
    def load(rank):
        from torchvision import datasets

        from ddpkit.data import mnist_root

        root = mnist_root()
        return root, len(datasets.MNIST(root, train=True)), len(datasets.MNIST(root, train=False))

    run = ddpkit.spawn(load, nprocs=4, start_method=start_method, view=False)
    assert run.values == [(data.mnist_root(), 8000, 2000)] * 4
    assert sorted(os.listdir(raw(run[0][0]))) == FILES  # no half-written file is left beside them


def test_folder_that_cannot_be_written_gives_way_to_a_temporary_one(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(data.CACHE, str(tmp_path / "file" / "below"))
    root = data.mnist_root()
    assert Path(root).parent.parent == tmp_path / "temp"
    assert checksums(root) == data.SHA256


def test_nowhere_to_write_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(data.CACHE, str(tmp_path / "file" / "below"))
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"can be written nowhere.*Set the environment variable DDPKIT_DATA"):
        data.mnist_root()


def test_full_disk_leaves_nothing_half_done(monkeypatch, cache):
    def write(file, content):
        with open(file, "wb") as half:
            half.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space left on device"):
        data.mnist_root()
    assert not list(raw(cache / "mnist10k").iterdir())


def test_file_in_use_by_another_rank_may_not_be_replaced(monkeypatch, cache):
    def replaced_by_another_rank(source, target):
        target.write_bytes(Path(source).read_bytes())
        raise PermissionError("Windows: in use by another process")

    monkeypatch.setattr(os, "replace", replaced_by_another_rank)
    assert Path(data.mnist_root()).parent == cache


def test_damaged_copy_in_the_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "PACKED", tmp_path)
    with pytest.raises(OSError, match=r"train-images-idx3-ubyte.gz cannot be read .*Install ddpkit again"):
        data.mnist_root()
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(b"not the digits")
    with pytest.raises(OSError, match=r"train-images-idx3-ubyte.gz is damaged.*Install ddpkit again"):
        data.mnist_root()


def test_place_of_the_cache_is_the_platforms(monkeypatch, tmp_path):
    monkeypatch.delenv(data.CACHE)
    for name in ("HOME", "USERPROFILE", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    for platform, xdg, place in [
        ("linux", None, ".cache"),
        ("linux", str(tmp_path / "xdg"), "xdg"),
        ("linux", "relative", ".cache"),
        ("darwin", None, "Library/Caches"),
        ("win32", None, ""),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(data.sys, "platform", platform)
            patch.delenv("XDG_CACHE_HOME", raising=False)
            if xdg:
                patch.setenv("XDG_CACHE_HOME", xdg)
            assert next(data._caches()) == tmp_path / place / "ddpkit"


def test_user_without_a_home_gets_a_temporary_folder(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(data.CACHE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert Path(data.mnist_root()).parent.parent == tmp_path / "temp"


def test_whole_set_without_a_network_says_what_to_do(no_network, cache):
    began = time.monotonic()
    with pytest.raises(ConnectionError) as error:
        data.mnist_root(full=True)
    assert time.monotonic() - began < 60
    text = str(error.value)
    assert "Tried https://" in text  # what torchvision asked, and what it got
    assert "Traceback" not in text
    assert "use mnist_root(), 10,000" in text
    assert str(raw(cache / "mnist")) in text
    assert all(name in text for name in data.FULL_SIZES)
    assert not list((cache / "mnist").glob("download-*"))


def test_whole_set_without_a_network_in_four_ranks(no_network):
    with pytest.raises(ddpkit.RankFailed, match=r"use mnist_root\(\), 10,000"):
        ddpkit.spawn(lambda rank: data.mnist_root(full=True), nprocs=4, view=False)


def test_whole_set_that_is_there_needs_no_network(no_network, cache):
    whole_set(cache / "mnist")
    assert data.mnist_root(full=True) == str(cache / "mnist")


def test_whole_set_is_downloaded_once_for_four_ranks(monkeypatch, tmp_path, cache):
    calls = torchvision_that(monkeypatch, tmp_path, BRING)
    run = ddpkit.spawn(lambda rank: data.mnist_root(full=True), nprocs=4, view=False)
    assert run.values == [str(cache / "mnist")] * 4
    assert calls.read_text() == "called\n"
    assert {file.name: file.stat().st_size for file in raw(cache / "mnist").iterdir()} == data.FULL_SIZES
    assert sorted(os.listdir(cache / "mnist")) == ["MNIST", "lock"]


@pytest.mark.parametrize("damage", [cut, empty, delete])
def test_damaged_file_of_the_whole_set_is_downloaded_again(monkeypatch, tmp_path, cache, damage):
    whole_set(cache / "mnist")
    damage(raw(cache / "mnist") / "train-images-idx3-ubyte")
    calls = torchvision_that(monkeypatch, tmp_path, BRING)
    assert data.mnist_root(full=True) == str(cache / "mnist")
    assert calls.read_text() == "called\n"
    assert all((raw(cache / "mnist") / name).stat().st_size == size for name, size in data.FULL_SIZES.items())


def test_zipped_files_put_there_by_hand_are_used(monkeypatch, tmp_path, cache):
    raw(cache / "mnist").mkdir(parents=True)
    (raw(cache / "mnist") / "train-images-idx3-ubyte.gz").write_bytes(b"zipped")
    torchvision_that(monkeypatch, tmp_path, f"assert (raw / 'train-images-idx3-ubyte.gz').read_bytes() == b'zipped'; {BRING}")
    assert data.mnist_root(full=True) == str(cache / "mnist")


def test_what_a_killed_download_left_is_removed(monkeypatch, tmp_path, cache):
    raw(cache / "mnist" / "download-abc").mkdir(parents=True)
    torchvision_that(monkeypatch, tmp_path, BRING)
    data.mnist_root(full=True)
    assert sorted(os.listdir(cache / "mnist")) == ["MNIST", "lock"]


def test_network_that_does_not_answer_is_given_up(monkeypatch, tmp_path, nothing_left):
    torchvision_that(monkeypatch, tmp_path, "threading.Event().wait()")
    monkeypatch.setattr(data, "SILENCE", 0.3)
    with pytest.raises(ConnectionError, match=r"nothing came in .* seconds"):
        data.mnist_root(full=True)


def test_download_of_the_wrong_size_is_not_taken(monkeypatch, tmp_path):
    torchvision_that(monkeypatch, tmp_path, "[(raw / name).touch() for name in SIZES]")
    with pytest.raises(ConnectionError, match="came with a size other than"):
        data.mnist_root(full=True)


def test_process_that_holds_the_lock_and_gets_nothing_is_not_waited_for(monkeypatch, cache):
    (cache / "mnist").mkdir(parents=True)
    monkeypatch.setattr(data, "SILENCE", -4.7)  # 5 seconds more for one that waits
    with open(cache / "mnist" / "lock", "a") as lock:
        assert data._try_lock(lock.fileno())
        with pytest.raises(ConnectionError, match="another process downloads it"):
            data.mnist_root(full=True)
