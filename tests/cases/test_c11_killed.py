"""The system kills a rank without a word, or the whole kernel, since every rank loads torch again into a small memory.

resistzzz/Prompt4NR#3, jupyter/notebook#2784
"""

from __future__ import annotations

import pytest

import ddpkit
from tests.cases import containers, fails, program, says


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_rank_is_named_with_its_last_words(start_method):
    def train(rank):
        import os
        import signal
        import time

        print(f"last words of rank {rank}")  # no flush on purpose
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    error = fails(ddpkit.RankDied, train, start_method=start_method, timeout=600)
    says(error, "rank 1 of 2 died: ", "SIGKILL (signal 9)", "memory", "fewer ranks or smaller batches", "Its last words: last words of rank 1")
    assert [failure.rank for failure in error.failures] == [1]
    assert error.output[1] == "last words of rank 1\n"


MANY = """
import sys
import ddpkit

def idle(rank):
    return rank

nprocs, method = int(sys.argv[1]), sys.argv[2]
ddpkit.spawn(idle, nprocs=1, start_method="forkserver")      # the forkserver has torch loaded by now
try:
    print(ddpkit.spawn(idle, nprocs=nprocs, start_method=method, view=False).values == list(range(nprocs)))
except ValueError as error:
    print(error)
    fit = int(str(error).rpartition("nprocs=")[2].rstrip("."))
    print(fit, "of them:", ddpkit.spawn(idle, nprocs=fit, start_method=method, view=False).values == list(range(fit)))
"""


@pytest.mark.parametrize(
    ("megabytes", "method"),
    [(1024, "forkserver"), (2048, "forkserver"), (2048, "spawn")],
)
def test_more_ranks_than_fit_are_refused_and_as_many_as_fit_run(megabytes, method, tmp_path):
    with containers.memory(megabytes) as before:
        done = program(tmp_path, MANY, "64", method, before=before)
    assert done.returncode == 0, done.stderr
    if method == "spawn" or megabytes < 2048:
        says(done.stdout, "64 ranks do not fit into memory: they need about ", " MB are available. At most ", " of them: True\n")
    else:  # ranks of the forkserver share torch's memory: 64 of them may well fit
        assert done.stdout == "True\n" or done.stdout.endswith(" of them: True\n")


GREEDY = """
import ddpkit

def greedy(rank):
    print("wants all of it")
    if rank == 1:
        held = []
        while True:
            held.append(b"x" * (16 << 20))
    import time
    time.sleep(300)

try:
    ddpkit.spawn(greedy, view=False)
except ddpkit.RankDied as error:
    print(error)
print(ddpkit.spawn(abs, view=False).values)
"""


def test_a_rank_that_takes_all_memory_is_named(tmp_path):
    with containers.memory(1024) as before:
        done = program(tmp_path, GREEDY, before=before)
    assert done.returncode == 0, done.stderr
    says(done.stdout, "rank 1 of 2 died: ", "SIGKILL", "memory", "fewer ranks or smaller batches", "Its last words: wants all of it", "[0, 1]\n")
