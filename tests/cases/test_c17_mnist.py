"""All ranks fetch MNIST at once and one reads half a file; the server says no; a half file stays and every later run fails.

pytorch/vision#1938, pytorch/tutorials#3065
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpkit
from ddpkit import data
from tests.cases import fails, says

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache, and no network."""
    monkeypatch.setenv(data.CACHE, str(tmp_path / "fresh"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    return tmp_path / "fresh"


def load(rank):
    from torchvision.datasets import MNIST

    from ddpkit.data import mnist_root

    digits = MNIST(mnist_root(), train=True)
    return len(digits), int(digits.targets.sum())


def test_four_ranks_at_once_and_broken_files(cache):
    first = ddpkit.spawn(load, nprocs=4, view=False).values
    assert first == [first[0]] * 4 and first[0][0] == 8000
    (folder,) = cache.glob("*/MNIST/raw")
    files = sorted(Path(folder).iterdir())
    assert len(files) == 4
    for file in files:  # half a download
        file.write_bytes(file.read_bytes()[:1000])
    assert ddpkit.spawn(load, nprocs=2, view=False).values == [first[0]] * 2


def test_the_whole_set_without_a_network(cache):
    def load_all(rank):
        return data.mnist_root(full=True)

    error = fails(ddpkit.RankFailed, load_all, nprocs=4, within=60)
    says(
        error, "of 4 failed: ConnectionError: ", "could not be downloaded", "use mnist_root(), 10,000 of its digits", "put its four files", str(cache)
    )
    assert not any(failure.follows for failure in error.failures) and "host name" not in str(error)


def test_torchvisions_own_download_without_a_network(tmp_path):
    def load_by_hand(rank):
        from torchvision.datasets import MNIST

        return len(MNIST(tmp_path / "by-hand", train=True, download=True))

    error = fails(ddpkit.RankFailed, load_by_hand, nprocs=2, within=60)
    says(error, " of 2 failed: ", "Error downloading train-images", "in load_by_hand\n", "could not be downloaded", "ddpkit.data.mnist_root()")
    assert not any(failure.follows for failure in error.failures) and "peer" not in str(error) and "host name" not in str(error)
