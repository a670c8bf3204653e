"""Faults of every kind, at every place of a run: the right error in bounded time, what was printed, nothing left, and a next call that works."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

import ddpkit
from ddpkit import agent
from tests.leftovers import processes

KIT = ("agent.py", "rank.py", "payload.py", "multiprocessing/", "forkserver.py")
"""Files that a report never shows: a learner can do nothing about them."""
BOUND = {"forkserver": 5.0, "spawn": 30.0}
"""Seconds until the error is there. The aim is 1.5 for ranks that the forkserver makes; machines that run tests are noisy."""


@pytest.fixture(autouse=True)
def the_next_call_works(nothing_left: None) -> Iterator[None]:
    """After each fault a call returns what it should; then (nothing_left) everything is gone."""
    yield

    def sums(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.tensor([rank + 1])
        dist.all_reduce(x)
        return int(x)

    assert ddpkit.spawn(sums, view=False).values == [3, 3]


def fault(expected, fn, args=(), *, nprocs=2, start_method="forkserver", within=0.0, **options):
    """Run what must fail; returns the error. Its report has the faulty line of this file, and none of the kit's."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        ddpkit.spawn(fn, args, nprocs=nprocs, start_method=start_method, view=False, **options)
    seconds = time.monotonic() - began
    error = caught.value
    assert type(error) is expected
    assert seconds < (within or BOUND[start_method])
    assert [name for name in KIT if name in str(error)] == []
    assert error.rank == error.failures[0].rank and not error.failures[0].follows
    assert len(error.output) == nprocs
    return error


def shows(error, *lines):
    """The report shows these lines of this file, in this order."""
    text = str(error)
    assert "test_failures.py, line" in text
    places = [text.find(line) for line in lines]
    assert -1 not in places and places == sorted(places), text


# Where a rank may fail, by exception.


@pytest.mark.parametrize("nprocs", [2, 4])
def test_before_the_group_is_made(start_method, nprocs):
    def train(rank):
        import torch.distributed as dist

        print("begins", rank)
        if rank == nprocs - 1:
            raise FileNotFoundError(2, "No such file or directory", "data.csv")  # the fault
        dist.init_process_group("gloo")

    error = fault(ddpkit.RankFailed, train, nprocs=nprocs, start_method=start_method)
    assert str(error).startswith(f"rank {nprocs - 1} of {nprocs} failed: FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'\n")
    shows(error, "  # the fault")
    assert isinstance(error.cause, FileNotFoundError) and error.cause.filename == "data.csv"
    assert error.output[-1] == f"begins {nprocs - 1}\n"
    assert [f.rank for f in error.failures] == [nprocs - 1]  # those that were ended are no failures


@pytest.mark.parametrize("nprocs", [2, 4])
def test_in_the_rendezvous(nprocs):
    def train(rank):
        import torch.distributed as dist

        print("begins", rank)
        dist.init_process_group("nope" if rank == 1 else "gloo")  # the fault

    error = fault(ddpkit.RankFailed, train, nprocs=nprocs)
    assert str(error).startswith(f"rank 1 of {nprocs} failed: ")
    assert "nope" in error.failures[0].text
    shows(error, "  # the fault")
    assert error.output[1].startswith("begins 1\n")  # torch adds a warning


@pytest.mark.parametrize("nprocs", [2, 4])
def test_in_forward(nprocs):
    def train(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)

            def forward(self, x):
                return self.layer(x)  # the fault

        dist.init_process_group("gloo")
        model = DDP(Model())
        print("model ready", rank)
        for step in range(3):
            out = model(torch.ones(1, 3 if rank == step == 1 else 2))  # the call
            out.sum().backward()

    error = fault(ddpkit.RankFailed, train, nprocs=nprocs)
    assert str(error).startswith(f"rank 1 of {nprocs} failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)\n")
    shows(error, "  # the call", "inside torch", "  # the fault")
    assert "Follow-on" not in str(error)
    assert error.output == tuple(f"model ready {rank}\n" for rank in range(nprocs))


def test_in_backward(start_method):
    def train(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Break(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise ArithmeticError("no gradient today")  # the fault

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 2))
        print("model ready")
        out = model(torch.ones(1, 2))
        if rank == 0:
            out = Break.apply(out)
        out.sum().backward()  # the call

    error = fault(ddpkit.RankFailed, train, start_method=start_method)
    assert str(error).startswith("rank 0 of 2 failed: ArithmeticError: no gradient today\n")
    shows(error, "  # the call", "inside torch", "  # the fault")
    assert error.output[0] == "model ready\n"


@pytest.mark.parametrize("nprocs", [2, 4])
def test_in_a_collective(nprocs):
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2))
        print("first one done")
        dist.all_reduce(torch.ones(2, dtype=torch.complex64) if rank == 1 else torch.ones(2), op=dist.ReduceOp.MAX)  # the fault

    error = fault(ddpkit.RankFailed, train, nprocs=nprocs)
    assert error.rank == 1 and "complex" in error.failures[0].text
    shows(error, "  # the fault")
    assert error.output == ("first one done\n",) * nprocs
    assert all(f.follows for f in error.failures[1:])


def test_in_a_dataloader_worker(start_method):
    def train(rank):
        from torch.utils.data import DataLoader, Dataset

        class Images(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 5:
                    raise LookupError("picture 5 is broken")  # the fault
                return index

        print("begins")
        if rank == 1:
            for _ in DataLoader(Images(), num_workers=2):  # the loop
                pass

    error = fault(ddpkit.RankFailed, train, start_method=start_method)
    assert str(error).startswith("rank 1 of 2 failed: LookupError: Caught LookupError in DataLoader worker process 1.")
    shows(error, "  # the fault", "LookupError: picture 5 is broken", "  # the loop")
    assert error.output[1].startswith("begins\n")


@pytest.mark.parametrize(("loop", "within"), [("for", 12.0), ("next", 5.0)])
def test_beside_busy_dataloader_workers(loop, within):
    """torch waits up to 5 s for a busy worker when its iterator goes: at the end of a `for` before the kit hears of the failure, else never."""

    def train(rank):
        from torch.utils.data import DataLoader, Dataset

        class Slow(Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, index):
                if index > 0:
                    time.sleep(600)
                return index

        loader = DataLoader(Slow(), num_workers=1)
        if loop == "for":
            for _ in loader:
                print("a batch")
                raise ValueError("stop here")  # the fault
        batches = iter(loader)
        next(batches)
        print("a batch")
        raise ValueError("stop here")  # the fault

    error = fault(ddpkit.RankFailed, train, within=within)
    assert str(error).startswith("ranks 0 and 1 of 2 failed: ValueError: stop here\n") and str(error).endswith("All ranks failed in the same way.")
    shows(error, "  # the fault")
    assert error.output == ("a batch\n", "a batch\n")


def test_in_unpickling_an_argument(start_method):
    class Config:
        def __getstate__(self):
            return {"width": 3}

        def __setstate__(self, state):
            print("unpickling")
            raise KeyError("height")  # the fault

    def train(rank, config):
        pass

    error = fault(ddpkit.RankFailed, train, (Config(),), start_method=start_method)
    assert str(error).startswith("ranks 0 and 1 of 2 failed: KeyError: 'height'\n  (while unpickling the function)\n")
    shows(error, "  # the fault")
    assert error.output == ("unpickling\n", "unpickling\n")


def test_in_pickling_the_result(start_method):
    class Report:
        def __reduce__(self):
            raise PermissionError("not to be sent")  # the fault

    def train(rank, kind):
        print("computed")
        return kind() if rank == 1 else 0

    error = fault(ddpkit.RankFailed, train, (Report,), start_method=start_method)
    assert str(error).startswith("rank 1 of 2 failed: PermissionError: not to be sent\n  (while pickling the returned value)\n")
    shows(error, "  # the fault")
    assert error.output == ("computed\n", "computed\n")


def test_a_result_that_cannot_be_pickled():
    def train(rank):
        print("computed")
        return (i for i in range(rank))

    error = fault(ddpkit.RankFailed, train)
    assert str(error).startswith("ranks 0 and 1 of 2 failed: TypeError: cannot pickle 'generator' object\n  (while pickling the returned value)")
    assert error.output == ("computed\n", "computed\n")


def test_a_result_that_cannot_be_unpickled():
    class Report:
        def __init__(self):
            self.page = 1

        def __setstate__(self, state):
            raise KeyError("page")

    def train(rank, kind):
        print("computed")
        return kind() if rank == 1 else 0

    error = fault(ddpkit.RankFailed, train, (Report,))
    assert str(error).startswith("rank 1 of 2 failed: KeyError: what it returned cannot be unpickled in the notebook: KeyError: 'page'")
    assert isinstance(error.cause, KeyError) and error.output == ("computed\n", "computed\n")


def test_in_del_and_atexit(start_method):
    """The value is there, as in a script that has done its work, and what Python says of it is in the output."""

    def train(rank):
        import atexit

        class Model:
            def __del__(self):
                raise ValueError("in __del__")

        def leave():
            raise ValueError("in atexit")

        def vanish():
            print("vanishes", flush=True)
            if rank == 1:
                os._exit(3)

        atexit.register(vanish)  # the last one to run
        atexit.register(leave)
        print("begins")
        Model()
        return rank * 10

    run = ddpkit.spawn(train, start_method=start_method, view=False)
    assert run.values == [0, 10]
    for text in run.output:
        assert text.startswith("begins\n") and text.endswith("vanishes\n")
        assert "ValueError: in __del__" in text and "ValueError: in atexit" in text


def test_a_crash_in_atexit():
    def train(rank):
        import atexit
        import ctypes

        atexit.register(ctypes.string_at, 0)
        return rank * 10

    assert ddpkit.spawn(train, view=False).values == [0, 10]


# What may be raised.


def test_an_exception_that_does_not_unpickle(start_method):
    class Refused(Exception):
        def __init__(self, code, reason):
            super().__init__(f"code {code}: {reason}")

    def train(rank):
        print("begins")
        if rank == 1:
            raise Refused(7, "too late")  # the fault

    error = fault(ddpkit.RankFailed, train, start_method=start_method)
    assert error.failures[0].kind.endswith("Refused") and error.failures[0].text == "code 7: too late"
    assert "code 7: too late" in str(error) and error.cause is None
    shows(error, "  # the fault")
    assert error.output[1] == "begins\n"


@pytest.mark.parametrize("how", ["cannot be pickled", "str raises", "is not ASCII", "is a surrogate", "keyboard", "is none", "is huge"])
def test_odd_exceptions(how):
    class Odd(Exception):
        def __str__(self):
            if how == "str raises":
                raise RuntimeError("no words")
            return super().__str__()

    def train(rank):
        import threading

        if rank == 1:
            what = {
                "cannot be pickled": Odd(threading.Lock()),
                "is not ASCII": Odd("é │ 日本"),
                "is a surrogate": Odd(b"caf\xe9".decode("utf-8", "surrogateescape")),
                "keyboard": KeyboardInterrupt(),
                "is none": Odd(),
                "is huge": Odd("x" * 3_000_000),
            }
            raise what.get(how, Odd("?"))  # the fault

    error = fault(ddpkit.RankFailed, train)
    shows(error, "  # the fault")
    texts = {"is not ASCII": "é │ 日本", "is a surrogate": "caf\udce9", "str raises": "its __str__ raised RuntimeError", "keyboard": ""}
    assert texts.get(how, "") in error.failures[0].text
    assert error.failures[0].kind.endswith("KeyboardInterrupt" if how == "keyboard" else "Odd")
    assert (error.cause is None) == (how == "cannot be pickled")


def test_a_chain_of_exceptions():
    def train(rank):
        try:
            {}["weights"]  # the cause
        except KeyError as error:
            raise ValueError("no checkpoint") from error  # the fault

    error = fault(ddpkit.RankFailed, train)
    assert str(error).startswith("ranks 0 and 1 of 2 failed: ValueError: no checkpoint\n  KeyError: 'weights'\n")
    shows(error, "  # the cause", "and while that was handled, or because of it:", "  # the fault")


def test_endless_recursion_has_a_short_report():
    def train(rank):
        def descend(depth):
            return descend(depth + 1)  # the fault

        if rank == 1:
            descend(0)  # the call

    error = fault(ddpkit.RankFailed, train)
    assert str(error).startswith("rank 1 of 2 failed: RecursionError: maximum recursion depth exceeded")
    shows(error, "  # the call", "  # the fault")
    assert len(str(error).splitlines()) < 50  # Python itself says "Previous line repeated 970 more times"


# How a process may die.


def die_in_a_collective(how, nprocs, start_method):
    def train(rank):
        import ctypes

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2))
        print("ready", rank)
        if rank == 1:
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "SIGSEGV":
                ctypes.string_at(0)  # the fault
            if how == "SIGABRT":
                os.abort()  # the fault
            os._exit(int(how))
        for _ in range(100):
            dist.all_reduce(torch.ones(2))

    error = fault(ddpkit.RankDied, train, nprocs=nprocs, start_method=start_method)
    assert error.rank == 1 and error.failures[0].died and error.cause is None
    assert str(error).startswith(f"rank 1 of {nprocs} died: its process ")
    assert "Its last collective was all_reduce (float32 [2], number 1 of the default group)." in str(error)
    assert error.output[1].startswith("ready 1\n") and error.output[0] == "ready 0\n"
    assert all(f.follows for f in error.failures[1:]), error.failures
    if len(error.failures) > 1:
        others = " and ".join(", ".join(str(f.rank) for f in error.failures[1:]).rsplit(", ", 1))
        plural = "s" * (len(error.failures) > 2)
        assert f"Follow-on, only because a peer was gone: rank{plural} {others}." in str(error)
        assert str(error).index("died") < str(error).index("Follow-on")
    return error


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", "was killed by SIGKILL (signal 9)"),
        ("SIGTERM", "was ended by SIGTERM (signal 15)"),
        ("SIGSEGV", "crashed with a segmentation fault (SIGSEGV, signal 11)"),
        ("SIGABRT", "aborted (SIGABRT, signal 6)"),
        ("0", "ended itself with exit status 0 before its function returned"),
        ("3", "ended itself with exit status 3 before its function returned"),
    ],
)
def test_dying_while_others_are_in_a_collective(how, words):
    error = die_in_a_collective(how, 2, "forkserver")
    assert words in str(error)
    if how in ("SIGSEGV", "SIGABRT"):
        shows(error, "  # the fault")
    assert error.failures[0].kind == (how if how.startswith("SIG") else f"exit status {how}")
    assert [f.rank for f in error.failures] == [1, 0]


@pytest.mark.parametrize(("how", "nprocs", "method"), [("SIGKILL", 4, "forkserver"), ("0", 4, "forkserver"), ("SIGSEGV", 2, "spawn")])
def test_dying_among_four_ranks_and_under_spawn(how, nprocs, method):
    die_in_a_collective(how, nprocs, method)


@pytest.mark.parametrize("where", ["before the group", "backward", "unpickling", "pickling", "a thread"])
def test_killed_elsewhere(where):
    class Kill:
        def __reduce__(self):
            return (os.kill, (os.getpid(), signal.SIGKILL)) if where != "pickling" else os._exit(4)

    class Deadly:
        def __getstate__(self):
            return {"signal": signal.SIGKILL}

        def __setstate__(self, state):
            os.kill(os.getpid(), state["signal"])

    def train(rank, kind, _):
        import threading

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

        print("begins")
        if rank == 1 and where == "before the group":
            kill()
        if rank == 1 and where == "pickling":
            return kind()
        dist.init_process_group("gloo")
        if rank == 1 and where == "a thread":
            threading.Thread(target=kill).start()
        if where == "backward":
            model = DDP(torch.nn.Linear(2, 2))
            out = model(torch.ones(1, 2))
            if rank == 1:
                out.register_hook(kill)
            out.sum().backward()
        dist.barrier()
        return 0

    error = fault(ddpkit.RankDied, train, (Kill, Deadly() if where == "unpickling" else None))
    kind = "exit status 4" if where == "pickling" else "SIGKILL"
    assert error.failures[0].kind == kind
    if where == "unpickling":
        assert [(f.rank, f.kind) for f in error.failures] == [(0, kind), (1, kind)] or error.rank in (0, 1)
    else:
        assert error.rank == 1 and error.output[1] == "begins\n"


@pytest.mark.parametrize("how", ["os._exit", "SIGKILL"])
def test_a_dataloader_worker_dies(how, tmp_path):
    def train(rank, taken):
        from torch.utils.data import DataLoader, Dataset

        class Images(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 5:
                    while not taken.exists():  # the rank has all that came before
                        time.sleep(0.001)
                    os._exit(1) if how == "os._exit" else os.kill(os.getpid(), signal.SIGKILL)
                return index

        print("begins")
        if rank == 1:
            for batch in DataLoader(Images(), num_workers=1):  # the loop
                if batch.item() == 4:
                    taken.touch()

    error = fault(ddpkit.RankFailed, train, (tmp_path / "taken",), within=12)  # torch itself looks every 5 s
    assert error.rank == 1 and "DataLoader worker (pid" in error.failures[0].text
    shows(error, "  # the loop")
    assert "Usually this means: a process of the DataLoader was ended" in str(error)
    assert error.output[1].startswith("begins\n")


def test_a_rank_starts_processes_as_a_script_would():
    """Where nothing was chosen, a DataLoader's workers start as the platform has it, whatever started the rank."""

    def train(rank):
        import multiprocessing

        return multiprocessing.get_start_method()

    import multiprocessing

    expected = multiprocessing.get_start_method()
    for method in BOUND:
        assert ddpkit.spawn(train, nprocs=1, start_method=method, view=False).values == [expected]


@pytest.mark.parametrize(
    ("argument", "words"), [(3, "called sys.exit(3)"), ("bye", "called sys.exit(bye)"), (None, "called sys.exit()"), (0, "called sys.exit(0)")]
)
def test_sys_exit(argument, words):
    def train(rank):
        print("begins")
        if rank == 1:
            sys.exit(argument)  # the fault

    error = fault(ddpkit.RankDied, train)
    assert str(error).startswith(f"rank 1 of 2 {words}, so there is no value.\n")
    shows(error, "  # the fault")
    assert error.output[1] == "begins\n" and isinstance(error.cause, SystemExit)


def test_sys_exit_and_quiet_exit_under_spawn():
    def train(rank):
        print("begins", flush=True)
        if rank == 1:
            os._exit(0)
        sys.exit(3)

    error = fault(ddpkit.RankDied, train, start_method="spawn")
    assert error.output[error.rank] == "begins\n"
    assert error.failures[0].kind in ("SystemExit", "exit status 0")


def test_every_rank_dies_alike():
    def train(rank):
        os.kill(os.getpid(), signal.SIGKILL)

    error = fault(ddpkit.RankDied, train, nprocs=4)
    assert error.failures[0].kind == "SIGKILL" and str(error).count("SIGKILL") == 1


def test_one_fails_while_another_is_stopped():
    def train(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("the other one is stopped")  # the fault

    error = fault(ddpkit.RankFailed, train)
    assert error.rank == 1
    shows(error, "  # the fault")


# What may be wrong with output.


def test_a_closed_stdout(start_method):
    def train(rank, fails):
        print("first")
        if rank == 0:
            sys.stdout.close()
            sys.stderr.close()
        else:
            os.close(1)
            os.close(2)
        if fails and rank == 1:
            raise ValueError("nobody hears")  # the fault
        return rank * 10

    error = fault(ddpkit.RankFailed, train, (True,), start_method=start_method)
    assert str(error).startswith("rank 1 of 2 failed: ValueError: nobody hears\n")
    shows(error, "  # the fault")
    assert error.output[1] == "first\n"
    run = ddpkit.spawn(train, (False,), view=False)
    assert run.values == [0, 10] and run.output == ["first\n", "first\n"]


def test_a_full_disk_for_output(start_method):
    def train(rank, fails):
        print("first")
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        if fails:
            print("second", flush=True)  # the fault
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        print("in a buffer until the end")
        return rank * 10

    error = fault(ddpkit.RankFailed, train, (True,), start_method=start_method)
    assert str(error).startswith("ranks 0 and 1 of 2 failed: OSError: [Errno 28] No space left on device\n")
    shows(error, "  # the fault")
    assert "or the disk is full" in str(error) and error.output == ("first\n", "first\n")
    assert ddpkit.spawn(train, (False,), view=False).values == [0, 10]


def test_a_hundred_megabytes_of_output():
    def train(rank):
        line = "x" * 999 + "\n"
        for _ in range(100):
            sys.stdout.write(line * 1000)
        print("the last words")
        raise ValueError("after much talk")  # the fault

    error = fault(ddpkit.RankFailed, train, nprocs=1, within=30)
    assert str(error).startswith("rank 0 of 1 failed: ValueError: after much talk\n")
    shows(error, "  # the fault")
    (text,) = error.output
    assert text.startswith("x" * 999 + "\n") and text.endswith("the last words\n")
    assert "left out: more than ddpkit keeps of one rank" in text and len(text) < 40_000_000


def test_one_fails_while_another_never_stops_talking():
    def train(rank):
        print("begins")
        if rank == 1:
            raise ValueError("amid much noise")  # the fault
        while True:
            print("la" * 500)

    error = fault(ddpkit.RankFailed, train)
    assert str(error).startswith("rank 1 of 2 failed: ValueError: amid much noise\n")
    shows(error, "  # the fault")
    assert error.output[1] == "begins\n" and error.output[0].startswith("begins\nlala")


def test_output_that_is_no_text(start_method):
    def train(rank):
        os.write(1, b"caf\xe9 \xff\xfe\x80\n")
        os.write(2, b"zero \0 byte, \xf0\x9f")
        os.write(2, b"\x98\x80 in two pieces\n")
        if rank == 1:
            raise ValueError("after noise")  # the fault

    error = fault(ddpkit.RankFailed, train, start_method=start_method)
    shows(error, "  # the fault")
    assert error.output[1] == "caf\\xe9 \\xff\\xfe\\x80\nzero \0 byte, 😀 in two pieces\n"


# What may outlive a rank.


def test_a_thread_that_never_ends(start_method):
    """Python waits for it when a script ends; the kit does so for ten seconds. The values are there."""

    def train(rank):
        import threading

        if rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
        return rank * 10

    began = time.monotonic()
    run = ddpkit.spawn(train, start_method=start_method, view=False)
    assert run.values == [0, 10] and run.output == ["", agent.NOT_ENDING]
    assert agent.LAST_STEPS <= time.monotonic() - began < agent.LAST_STEPS + BOUND[start_method]


def test_a_thread_that_never_ends_beside_a_failure():
    def train(rank):
        import threading

        threading.Thread(target=time.sleep, args=(600,)).start()
        if rank == 1:
            raise ValueError("with a thread")  # the fault

    error = fault(ddpkit.RankFailed, train)
    assert str(error).startswith("rank 1 of 2 failed: ValueError: with a thread\n")
    shows(error, "  # the fault")


@pytest.mark.parametrize("end", ["raise ValueError", "os._exit(0)", "return"])
def test_a_grandchild_that_outlives_its_rank(end):
    def train(rank):
        import subprocess

        code = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
        print(child.stdout.readline().strip(), flush=True)
        if end == "os._exit(0)":
            os._exit(0)
        if end == "raise ValueError":
            raise ValueError("left a child")  # the fault
        return rank

    if end == "return":
        output = ddpkit.spawn(train, view=False).output
    else:
        error = fault(ddpkit.RankFailed if end == "raise ValueError" else ddpkit.RankDied, train)
        output = error.output
    pids = [int(text) for text in output if text]
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_ignores_sigterm(start_method):
    def train(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("begins", os.getpid(), flush=True)
        if rank == 1:
            raise ValueError("and the other one does not listen")  # the fault
        while True:
            time.sleep(600)

    error = fault(ddpkit.RankFailed, train, start_method=start_method)
    assert str(error).startswith("rank 1 of 2 failed: ValueError: and the other one does not listen\n")
    shows(error, "  # the fault")
    pids = [int(text.split()[1]) for text in error.output if text]
    assert len(pids) >= 1 and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_will_not_be_interrupted_in_its_finally():
    """`destroy_process_group()` in a `finally` may wait for ever; the others' failure ends it all the same."""

    def train(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            if rank == 1:
                raise ValueError("before the finally")  # the fault
            dist.barrier()
        finally:
            dist.destroy_process_group()

    error = fault(ddpkit.RankFailed, train, nprocs=4)
    assert str(error).startswith("rank 1 of 4 failed: ValueError: before the finally\n")
    shows(error, "  # the fault")
    assert all(f.follows for f in error.failures[1:])


# What a rank may do to the kit.


@pytest.mark.parametrize("who", ["agent", "forkserver"])
def test_the_kits_own_process_is_killed(who):
    def train(rank):
        import psutil

        print("begins", flush=True)
        if rank == 1:
            parents = psutil.Process().parents()
            parents[0 if who == "agent" else 1].kill()
        time.sleep(2 if who == "forkserver" else 600)
        return rank

    if who == "forkserver":  # running agents go on; the next call starts another forkserver
        assert ddpkit.spawn(train, view=False).values == [0, 1]
    else:
        began = time.monotonic()
        with pytest.raises(ddpkit.LaunchFailed, match="lost while they ran"):
            ddpkit.spawn(train, view=False)
        assert time.monotonic() - began < BOUND["forkserver"]
    assert processes() == []


def test_a_rank_closes_all_its_descriptors():
    """As some programs do when they make themselves a daemon."""

    def train(rank):
        print("begins", flush=True)
        if rank == 1:
            os.closerange(0, 1024)
        return rank

    error = fault(ddpkit.RankDied, train)
    assert error.rank == 1 and error.output[1].startswith("begins\n")


def test_a_failure_in_a_group_of_some_ranks_names_the_right_rank():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        odd = dist.new_group([1, 3])
        print("ready")
        if rank == 3:
            raise ValueError("in the group")  # the fault
        if rank == 1:
            dist.all_reduce(torch.ones(1), group=odd)
        dist.barrier()

    error = fault(ddpkit.RankFailed, train, nprocs=4)
    assert str(error).startswith("rank 3 of 4 failed: ValueError: in the group\n")
    shows(error, "  # the fault")
    assert error.output == ("ready\n",) * 4


def test_unlike_failures_are_all_named():
    def train(rank):
        if rank == 1:
            raise ValueError("one")  # the fault
        if rank == 2:
            raise KeyError("two")
        time.sleep(600)

    error = fault(ddpkit.RankFailed, train, nprocs=4)
    first, second = error.failures
    assert (first.rank, second.rank) == (1, 2)
    assert str(error).endswith("rank 2 failed as well: KeyError: 'two'")
