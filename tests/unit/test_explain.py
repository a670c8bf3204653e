"""From what ranks reported to words for a person: known symptoms, the root cause first, how a process died, the learner's own lines."""

from __future__ import annotations

import os
import time

import pytest

import ddpkit
from ddpkit import explain
from ddpkit.errors import WIDTH, RankDied, RankFailed, RankFailure, RanksStuck
from ddpkit.messages import Ended, Failure, Stand
from ddpkit.symptoms import SYMPTOMS, find

# Known symptoms, each in an error that torch or Python really raises.


@pytest.fixture(scope="module")
def provoked():
    """Type and text of the errors that one process can have on a CPU, by the name of the symptom and a letter."""

    def provoke(rank):
        import socket
        import tempfile
        from datetime import timedelta
        from pathlib import Path

        import torch
        import torch.distributed as dist
        import torchvision
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, Dataset

        from ddpkit.rank import _text, _type_name

        heads = {}

        def raises(name, act):
            try:
                act()
            except BaseException as error:
                heads[name] = f"{_type_name(error)}: {_text(error)}"
            else:
                heads[name] = "nothing was raised"

        raises("no group yet", lambda: dist.all_reduce(torch.ones(1)))
        raises("no group yet b", lambda: DDP(torch.nn.Linear(1, 1)))
        dist.init_process_group("gloo")
        raises("group made twice", lambda: dist.init_process_group("gloo"))
        raises("device_ids with a CPU model", lambda: DDP(torch.nn.Linear(1, 1), device_ids=[0]))
        raises("tensors on unlike devices", lambda: torch.ones(2) + torch.ones(2, device="meta"))

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            raises("port taken", lambda: dist.TCPStore("127.0.0.1", port, 1, True))
            with socket.socket() as second:
                raises("port taken b", lambda: second.bind(("127.0.0.1", port)))

        def fill_disk():
            with open("/dev/full", "w") as file:
                file.write("x")

        raises("/dev/shm is full", fill_disk)

        class Unused(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

            def forward(self, x):
                return self.used(x)

        def train(model):
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()

        raises("unused parameters", lambda: train(DDP(Unused())))

        plain = torch.nn.Linear(1, 1)
        wrapped = DDP(plain)
        raises("module. prefix", lambda: plain.load_state_dict(wrapped.state_dict()))
        raises("module. prefix b", lambda: wrapped.load_state_dict(plain.state_dict()))

        class Deadly(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                os._exit(1)

        raises("a DataLoader worker died", lambda: list(DataLoader(Deadly(), num_workers=1)))

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            torch.save(plain, folder / "whole.pt")
            raises("weights_only", lambda: torch.load(folder / "whole.pt"))
            (folder / "half.pt").write_bytes((folder / "whole.pt").read_bytes()[:500])
            (folder / "empty.pt").touch()
            raises("half a checkpoint", lambda: torch.load(folder / "half.pt"))
            raises("half a checkpoint b", lambda: torch.load(folder / "none.pt"))
            raises("half a checkpoint c", lambda: torch.load(folder / "empty.pt", weights_only=False))
            raises("MNIST", lambda: torchvision.datasets.MNIST(folder))
            raises("(none) CIFAR", lambda: torchvision.datasets.CIFAR10(folder))

        raises("only in a notebook", lambda: display(1))  # noqa: F821
        raises("only in a notebook b", lambda: get_ipython())  # noqa: F821
        raises("nobody to ask", lambda: input("name? "))
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(milliseconds=50))
        raises("wait timed out", lambda: store.wait(["nobody sets this"]))
        raises("wait timed out b", lambda: dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(milliseconds=50)))
        torch.cuda._is_in_bad_fork = lambda: True  # what torch finds in a forked process whose parent had used the GPU
        raises("CUDA in a forked process", torch.cuda.init)

        def run_too_long():
            import subprocess
            import sys

            subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.01)

        raises("(none) subprocess", run_too_long)
        raises("(none) shapes", lambda: torch.ones(2, 3) @ torch.ones(2, 3))
        raises("(none) broadcasting", lambda: torch.ones(2) + torch.ones(3))
        raises("(none) concatenation", lambda: torch.cat([torch.ones(1, 2), torch.ones(2, 3)], 1))
        raises("(none) batch size", lambda: DataLoader([1], batch_size=0.5))
        raises("(none) file", lambda: Path("data.csv").read_text())
        raises("(none) keyword", lambda: torch.nn.Linear(1, 1).load_state_dict({}, weights=True))
        raises("(none) missing key", lambda: plain.load_state_dict({}))
        raises("(none) name", lambda: displayed)  # noqa: F821
        raises("(none) grad", lambda: torch.ones(1).backward())
        raises("(none) twice backward", lambda: [y.backward() for x in [torch.ones(1, requires_grad=True)] for y in [(x * x).sum()] * 2])
        return heads

    return ddpkit.spawn(provoke, nprocs=1, view=False)[0]


PROVOKED = {
    "no group yet": "no group yet",
    "no group yet b": "no group yet",
    "group made twice": "group made twice",
    "device_ids with a CPU model": "device_ids with a CPU model",
    "tensors on unlike devices": "tensors on unlike devices",
    "port taken": "port taken",
    "port taken b": "port taken",
    "/dev/shm is full": "/dev/shm is full",
    "unused parameters": "unused parameters",
    "module. prefix": "module. prefix",
    "module. prefix b": "module. prefix",
    "a DataLoader worker died": "a DataLoader worker died",
    "weights_only": "weights_only",
    "half a checkpoint": "half a checkpoint",
    "half a checkpoint b": "half a checkpoint",
    "half a checkpoint c": "half a checkpoint",
    "MNIST": "MNIST",
    "only in a notebook": "only in a notebook",
    "only in a notebook b": "only in a notebook",
    "nobody to ask": "nobody to ask",
    "wait timed out": "wait timed out",
    "wait timed out b": "wait timed out",
    "CUDA in a forked process": "CUDA in a forked process",
}


@pytest.mark.parametrize("key", PROVOKED)
def test_a_real_error_is_known(provoked, key):
    if key == "a DataLoader worker died" and "ConnectionResetError" in provoked[key]:
        pytest.skip("the worker died while it handed over its first batch")
    found = find(provoked[key])
    assert found is not None and found.name == PROVOKED[key], provoked[key]


def test_real_errors_of_other_kinds_are_not_taken_for_known_ones(provoked):
    innocent = {key: text for key, text in provoked.items() if key.startswith("(none)")}
    assert len(innocent) == 12 and "nothing was raised" not in innocent.values()
    assert {key: found.name for key, text in innocent.items() if (found := find(text))} == {}


LITERAL = [
    # What torch, NCCL, gloo and the C library say, from their sources and from the public threads that symptoms.py cites.
    ("unused parameters", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates"),
    (
        "two forwards with buffers",
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.FloatTensor [64]] is "
        "at version 4; expected version 3 instead. Hint: enable anomaly detection",
    ),
    ("tensors on unlike devices", "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    ("tensors on unlike devices", "RuntimeError: No backend type associated with device type cpu"),
    ("tensors on unlike devices", "ValueError: Tensors must be CUDA and dense"),
    ("two ranks on one GPU", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, invalid usage (run with NCCL_DEBUG=WARN "
     "for details), NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
     "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50"),
    ("CUDA in a forked process", "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
     "'spawn' start method"),
    ("GPU memory is full", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB"),
    ("GPU memory is full", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("port taken", "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to "
     "[::]:29500 (errno: 98 - Address already in use)."),
    ("port taken", "OSError: [Errno 98] Address already in use"),
    ("port taken", "OSError: [Errno 48] Address already in use"),
    ("group made twice", "RuntimeError: trying to initialize the default process group twice!"),
    ("group made twice", "ValueError: trying to initialize the default process group twice!"),
    ("no group yet", "RuntimeError: Default process group has not been initialized, please make sure to call init_process_group."),
    ("name not resolved", "socket.gaierror: [Errno -2] Name or service not known"),
    ("name not resolved", "socket.gaierror: [Errno -3] Temporary failure in name resolution"),
    ("name not resolved", "RuntimeError: [enforce fail at third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address "
     "for: Unable to resolve hostname to a (local) address"),
    ("name not resolved", "torch.distributed.DistNetworkError: The IPv4 network addresses of (no-such-host, 29500) cannot be retrieved (gai error: "
     "-2 - Name or service not known)."),
    ("models differ", "RuntimeError: [1]: params[0] in this process with sizes [2, 1] appears not to match sizes of the same param in process 0."),
    ("models differ", "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 4 params."),
    ("tensors differ", "RuntimeError: [enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    ("tensors differ", "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (3), got (2))"),
    ("tensors differ", "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("),
    ("/dev/shm is full", "RuntimeError: DataLoader worker (pid 83) is killed by signal: Bus error. It is possible that dataloader's workers are out "
     "of shared memory. Please try to raise your shared memory limit."),
    ("/dev/shm is full", "RuntimeError: unable to write to file </torch_83_1>: No space left on device (28)"),
    ("/dev/shm is full", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."),
    ("/dev/shm is full", "OSError: [Errno 28] No space left on device"),
    ("class of a cell", "AttributeError: Can't get attribute 'Config' on <module '__main__'>"),
    ("a number in the environment", "TypeError: str expected, not int"),
    ("too many open files", "OSError: [Errno 24] Too many open files"),
    ("too many open files", "RuntimeError: unable to open shared memory object </torch_83_1> in read-write mode: Too many open files (24)"),
    ("a DataLoader worker died", "RuntimeError: DataLoader worker (pid(s) 28583, 28584) exited unexpectedly"),
    ("a DataLoader worker died", "RuntimeError: DataLoader worker (pid 4161) is killed by signal: Killed. "),
    ("module. prefix", 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight". \n'
     '\tUnexpected key(s) in state_dict: "module.fc.weight". '),
    ("weights_only", "_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value of the `weights_only` "
     "argument"),
    ("MNIST", "RuntimeError: Error downloading train-images-idx3-ubyte.gz"),
    ("MNIST", "RuntimeError: Error downloading t10k-labels-idx1-ubyte.gz:\nTried https://ossci-datasets.s3.amazonaws.com/mnist/, "
     "got:\n<urlopen error>"),
    ("half a checkpoint", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ("half a checkpoint", "_pickle.UnpicklingError: pickle data was truncated"),
    ("half a checkpoint", "EOFError: Ran out of input"),
    ("half a checkpoint", "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/run/model.ckpt'"),
    ("only in a notebook", "NameError: name 'display' is not defined"),
    ("nobody to ask", "EOFError: EOF when reading a line"),
    ("wait timed out", "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
     "operation to complete"),
    ("wait timed out", "torch.distributed.DistStoreError: wait timeout after 100ms, keys: /x"),
    ("wait timed out", "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
     "(10.0.0.1, 29500)."),
    ("wait timed out", "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined."),
    ("wait timed out", "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
     "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600011 milliseconds before timing out."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "headline"), LITERAL, ids=lambda value: value[:40])
def test_a_message_is_known(name, headline):
    found = find(headline)
    assert found is not None and found.name == name
    assert found.means and found.cure


def test_every_symptom_has_a_message():
    told = {name for name, _ in LITERAL} | set(PROVOKED.values())
    assert [symptom.name for symptom in SYMPTOMS if symptom.name not in told] == []
    assert len({symptom.name for symptom in SYMPTOMS}) == len(SYMPTOMS)
    for symptom in SYMPTOMS:  # they are put between "Usually this means: …." and "Try: …."
        assert not symptom.means.endswith(".") and not symptom.cure.endswith(".")


INNOCENT = [
    "ValueError: too many values to unpack (expected 2)",
    "KeyError: 'module'",
    "KeyError: 'weights'",
    "IndexError: index 10 is out of bounds for dimension 0 with size 10",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 2 but got size 3 for tensor number 1 in the list.",
    "RuntimeError: Trying to backward through the graph a second time",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "RuntimeError: expected scalar type Float but found Double",
    'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.bias". ',
    "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param with shape torch.Size([2, 2])",
    "RuntimeError: Dataset not found or corrupted. You can use download=True to download it",  # CIFAR's
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error: invalid device ordinal",
    "ModuleNotFoundError: No module named 'shm'",
    "NameError: name 'displayed' is not defined",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/srv/texts.pt_BR/words.txt'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/my.binaries/tool'",
    "TypeError: load() got an unexpected keyword argument 'weights_only'",
    "subprocess.TimeoutExpired: Command '['sleep', '3']' timed out after 0.1 seconds",
    "PermissionError: [Errno 13] Permission denied: '/dev/shm'",
    "AssertionError",
    "AssertionError: wait",
    "EOFError",
    "MemoryError",
    "KeyboardInterrupt",
    "ZeroDivisionError: division by zero",
    "TypeError: cannot pickle 'generator' object",
    "RecursionError: maximum recursion depth exceeded",
    "ConnectionRefusedError: [Errno 111] Connection refused",
]


@pytest.mark.parametrize("headline", INNOCENT)
def test_an_innocent_message_is_not_taken_for_a_known_one(headline):
    found = find(headline)
    assert found is None, found.name


def report(fn, expected=ddpkit.RankFailed, **options):
    with pytest.raises(expected) as caught:
        ddpkit.spawn(fn, view=False, **options)
    return str(caught.value)


def test_symptoms_that_need_two_ranks():
    def models(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        DDP(torch.nn.Linear(1, 1 + rank))

    def tensors(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(100 * (1 + rank)))

    def late(rank):
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        group = dist.new_group(timeout=timedelta(milliseconds=100))
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        time.sleep(60)

    means = {symptom.name: symptom.means for symptom in SYMPTOMS}
    assert means["models differ"] in report(models)
    assert means["tensors differ"] in report(tensors, ddpkit.RankDied)
    assert "waited longer than the timeout" in report(late, ddpkit.RanksStuck)


def test_parameters_without_a_gradient_are_named():
    def train(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

            def forward(self, x):
                return self.used(x)

        dist.init_process_group("gloo")
        model = DDP(Net())
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()

    text = report(train)
    assert "(by name: spare.weight, spare.bias)" in text and "find_unused_parameters=True" in text


# Several failures: which is to blame.


def failure(rank, kind="ValueError", text="bad", **more):
    return RankFailure(rank, kind, text, **more)


GONE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:30219"


def test_the_root_cause_is_first_and_what_followed_after():
    failures = [failure(0, "RuntimeError", GONE, follows=True), failure(1, "RuntimeError", GONE, follows=True), failure(2)]
    error = explain.error_of(failures, 4, ["", "", "", ""])
    assert type(error) is RankFailed and error.rank == 2
    assert [f.rank for f in error.failures] == [2, 0, 1]
    assert str(error) == "rank 2 of 4 failed: ValueError: bad\nFollow-on, only because a peer was gone: ranks 0 and 1."


def test_the_same_failure_in_all_ranks_is_named_once():
    error = explain.error_of([failure(r, text=f"bad in rank {r}", lines=("here",)) for r in (2, 0, 1)], 3, [""] * 3)
    assert str(error) == "ranks 0, 1 and 2 of 3 failed: ValueError: bad in rank 0\n  here\nAll ranks failed in the same way."
    assert [f.rank for f in error.failures] == [0, 1, 2]


def test_the_same_failure_in_some_ranks():
    error = explain.error_of([failure(0), failure(2), failure(1, "KeyError", "'x'")], 4, [""] * 4)
    assert str(error) == "ranks 0 and 2 of 4 failed: ValueError: bad\nranks 0 and 2 failed in the same way.\nrank 1 failed as well: KeyError: 'x'"


def test_only_follow_on_failures():
    """The rank that went away has returned, for example. One of them is named all the same."""
    error = explain.error_of([failure(1, "RuntimeError", GONE, follows=True)], 2, ["", ""])
    assert str(error).startswith("rank 1 of 2 failed: RuntimeError: [../third_party/gloo") and error.rank == 1


def test_a_death_beside_failures_that_followed():
    failures = [failure(0, "RuntimeError", GONE, follows=True, doing="all_reduce (float32 [3], number 2 of the default group)")]
    error = explain.error_of([*failures, failure(1, "SIGKILL", "its process was killed", died=True)], 2, ["", "step 7\nstep 8\n"])
    assert type(error) is RankDied and error.rank == 1
    assert str(error).splitlines() == [
        "rank 1 of 2 died: its process was killed.",
        "Follow-on, only because a peer was gone: rank 0.",
        "rank 0's last collective was all_reduce (float32 [3], number 2 of the default group).",
        "Its last words: step 8",
    ]


def test_last_words_are_those_of_the_rank_that_died():
    """And stand where no other rank's line comes between."""
    died = failure(0, "SIGKILL", "its process was killed", died=True)
    error = explain.error_of([died, failure(1, "KeyError", "'x'")], 2, ["one\ntwo\n\n", "other"])
    assert "Its last words: two" in str(error) and "other" not in str(error)
    assert "rank 1 failed as well: KeyError: 'x'" in str(error)


def test_sys_exit_in_words():
    error = explain.error_of([failure(0, "SystemExit", "3", lines=("here",))], 2, ["", ""])
    assert type(error) is RankDied and str(error) == "rank 0 of 2 called sys.exit(3), so there is no value.\n  here"


def test_a_known_symptom_is_in_the_report():
    error = explain.error_of([failure(0, "EOFError", "EOF when reading a line")], 1, [""])
    assert str(error).splitlines()[1:] == [
        "Usually this means: input() was called in a rank, and nobody can answer there.",
        "Try: ask in the notebook and pass the answer in args.",
    ]


def raised(kind, text, frames=(), **more):
    message = Failure(0, more.pop("stage", "running the function"), [{"type": kind, "text": text, "frames": list(frames)}], 0.0, **more)
    return explain.failure_of(message)


@pytest.mark.parametrize(
    "text",
    [
        GONE,
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer [127.0.0.1]:1",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:1] Read error [127.0.0.1]:36053: Connection reset by peer",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Write error [127.0.0.1]:1: Broken pipe",
        "Socket closed",
        "failed to recv, got 0 bytes",
    ],
)
def test_what_gloo_and_the_store_say_of_a_peer_that_is_gone_follows(text):
    assert raised("RuntimeError", text).follows
    assert raised("torch.distributed.DistNetworkError", text).follows


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ConnectionRefusedError", "[Errno 111] Connection refused"),  # the user's own download
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),  # a DataLoader worker that died
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("requests.exceptions.ConnectionError", "Connection refused"),
        ("ValueError", "the wait timeout must be positive"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)"),
    ],
)
def test_errors_of_the_users_own_connections_do_not_follow(kind, text):
    assert not raised(kind, text).follows


def test_several_ranks_whose_wait_was_given_up():
    late = "Timed out waiting 1000ms for recv operation to complete"
    failures = [failure(2, "RuntimeError", late, doing="barrier"), failure(0, "RuntimeError", late), failure(1, "RuntimeError", GONE, follows=True)]
    elsewhere = {r: Stand(r, 0.0, 0.0, False, None, [["a.py", 7, "train", "load()"]], {}) for r in range(4)}
    error = explain.error_of([*failures, failure(4, "KeyError", "'x'")], 6, [""] * 6, elsewhere, [5])
    assert type(error) is RanksStuck and error.rank == 0
    assert str(error).splitlines()[:-1] == [
        "ranks 0 and 2 of 6 waited longer than the timeout, and the others did not come.",
        "rank 0 waited",
        "rank 2 waited in barrier",
        "rank 3 was here",
        "  a.py, line 7, in train",
        "      load()",
        "rank 5 has returned",
        "rank 4 failed as well: KeyError: 'x'",
        f"RuntimeError: {late}",
    ]


# How a process died.


@pytest.mark.parametrize(
    ("exitcode", "kind", "words"),
    [
        (-9, "SIGKILL", "killed by SIGKILL (signal 9). Most often that is the system, because memory ran out"),
        (-11, "SIGSEGV", "segmentation fault (SIGSEGV, signal 11)"),
        (-6, "SIGABRT", "aborted (SIGABRT, signal 6)"),
        (-7, "SIGBUS", "/dev/shm"),
        (-15, "SIGTERM", "SIGTERM (signal 15) from outside"),
        (-4, "SIGILL", "ended by SIGILL"),
        (-120, "signal 120", "ended by signal 120"),
        (0, "exit status 0", "exit status 0 before its function returned"),
        (3, "exit status 3", "exit status 3 before its function returned"),
    ],
)
def test_how_a_process_died(exitcode, kind, words):
    death = explain.death_of(Ended(1, exitcode))
    assert (death.rank, death.kind, death.died, death.follows, death.cause) == (1, kind, True, False, None)
    assert words in death.text and death.lines == ()


def test_a_process_that_was_killed_for_want_of_memory():
    death = explain.death_of(Ended(1, -9, memory="this control group may use 512 MB and has used up to 512 MB"))
    assert death.text == (
        "the system killed its process (SIGKILL, signal 9), because memory ran out: this control group may use 512 MB and has used up to 512 MB. "
        "Use fewer ranks or smaller batches"
    )


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007feb5cfff6c0 (most recent call first):
  File "{python}/multiprocessing/connection.py", line 395 in _recv
  File "{kit}/rank.py", line 90 in hear
  File "{python}/threading.py", line 982 in run

Current thread 0x00007fec2be83b80 (most recent call first):
  File "{python}/ctypes/__init__.py", line 519 in string_at
  File "{here}", line 3 in inner
  File "<ipython-input-1>", line 7 in train
  File "{kit}/rank.py", line 125 in main
  File "{torch}/multiprocessing/spawn.py", line 87 in _wrap
  File "{python}/multiprocessing/process.py", line 314 in _bootstrap

Extension modules: numpy._core._multiarray_umath, torch._C (total: 20)
"""


def crash():
    import sysconfig

    paths = sysconfig.get_paths()
    kit = os.path.dirname(explain.__file__)
    return CRASH.format(python=paths["stdlib"], kit=kit, torch=paths["purelib"] + "/torch", here=__file__)


def test_the_learners_lines_in_a_crash():
    death = explain.death_of(Ended(0, -11, crash(), {"op": "barrier", "number": 0, "group": ""}))
    assert death.lines == (
        "<ipython-input-1>, line 7, in train",
        f"{explain.place_name(__file__)}, line 3, in inner",
        "    from __future__ import annotations",
        "… 1 call inside Python's library",
        "Its last collective was barrier.",
    )


@pytest.mark.parametrize("text", ["", "Fatal Python error: Aborted\n\n", crash()[:300], '  File "x', crash().replace("rank.py", "other.py")])
def test_half_a_crash_has_no_lines(text):
    assert explain.death_of(Ended(0, -11, text)).lines == ()


# The learner's own lines in an exception.


def frame(file, number=1, function="train", source="x = 1"):
    return [file, number, function, source]


def library(name):
    import sysconfig

    paths = sysconfig.get_paths()
    return f"{paths['stdlib']}/{name}" if "/" not in name else f"{paths['purelib']}/{name}"


def test_frames_of_libraries_are_counted():
    frames = [
        frame("/home/me/train.py", 3),
        frame(library("torch/nn/modules/module.py")),
        frame(library("torch/nn/modules/module.py")),
        frame(library("contextlib.py")),
        frame("<cell>", 9, "<module>", ""),
    ]
    assert raised("ValueError", "bad", frames).lines == (
        "/home/me/train.py, line 3, in train",
        "    x = 1",
        "… 3 calls inside torch, Python's library",
        "<cell>, line 9",
    )


def test_where_there_is_no_line_of_the_learners_the_librarys_are_shown():
    (place, source) = raised("ValueError", "bad", [frame(library("torch/a.py"), 3)]).lines
    assert place.endswith("torch/a.py, line 3, in train") and source == "    x = 1"


def test_where_one_of_a_chain_is_all_the_librarys_its_frames_are_counted():
    errors = [
        {"type": "Empty", "text": "", "frames": [frame(library("queue.py")), frame(library("torch/utils/data/dataloader.py"))]},
        {"type": "RuntimeError", "text": "worker died", "frames": [frame("/home/me/train.py", 3)]},
    ]
    assert explain.failure_of(Failure(0, "running the function", errors, 0.0)).lines == (
        "Empty",
        "… 2 calls inside Python's library, torch",
        "and while that was handled, or because of it:",
        "RuntimeError: worker died",
        "/home/me/train.py, line 3, in train",
        "    x = 1",
    )


def test_the_stage_is_told_where_it_is_not_the_function():
    assert raised("ValueError", "bad", stage="unpickling the function").lines == ("(while unpickling the function)",)
    assert raised("ValueError", "bad").lines == ()


def test_a_thousand_calls_of_the_learners_are_not_all_shown():
    lines = raised("RecursionError", "too deep", [frame("/home/me/a.py", number) for number in range(1000)]).lines
    assert len(lines) < 50
    assert lines[0] == "/home/me/a.py, line 0, in train" and lines[-2] == "/home/me/a.py, line 999, in train"


@pytest.mark.parametrize("payload", [b"", b"no pickle", b"cbuiltins\nint\n(S'7'\ntR."])
def test_a_cause_that_cannot_be_had_is_none(payload):
    found = raised("ValueError", "bad", payload=payload)
    assert found.cause is None and found.text == "bad"


def test_what_a_rank_was_doing():
    call = {"op": "all_reduce", "group": "default group", "number": 2, "root": -1, "dtype": "float32", "shapes": [[3]]}
    assert raised("ValueError", "bad", last_call=call).doing == "all_reduce (float32 [3], number 2 of the default group)"
    assert raised("ValueError", "bad").doing == ""


def test_a_shown_report_has_no_line_that_would_be_broken_in_a_word():
    report = f"it waits.\n  Cell In[3], line 2, in f\n      {'g(x)  + ' * 20}\n\n{'word ' * 60}"
    error = RankFailed(report)
    shown = error._render_traceback_()
    assert shown[:3] == ["RankFailed: it waits.", "  Cell In[3], line 2, in f", "      " + ("g(x)  + " * 13).rstrip()]
    assert all(len(line) <= WIDTH for line in shown) and all(line[:6].isspace() for line in shown[2:4])
    assert "".join("".join(shown).split()) == "".join(f"RankFailed: {report}".split())
    assert str(error) == report.replace("Cell In[3]", "Cell")
