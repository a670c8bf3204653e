"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import leftovers
from tests.kernels import Kernel


@pytest.fixture(params=["forkserver", "spawn"])
def start_method(request: pytest.FixtureRequest) -> str:
    """Both ways of starting ranks. A rank behaves the same under both."""
    return str(request.param)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no process, thread, open file, socket, shared memory or temporary file."""
    import ddpkit

    ddpkit.spawn(abs, nprocs=1)  # what is made once and stays (the forkserver) is there before the snapshot
    before = leftovers.settled(leftovers.snapshot() | {"processes": 0})
    yield
    assert leftovers.settled(before) == before


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A real Jupyter kernel."""
    with Kernel() as running:
        yield running
