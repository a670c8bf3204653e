"""Bad input gets a clear error before anything starts: what was given, what is wanted, what to do."""

from __future__ import annotations

import threading

import pytest

import ddpkit
from ddpkit import limits, rendezvous, supervise


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(supervise, "Job", refuse)


def fn(rank):
    return rank


@pytest.mark.parametrize(
    ("nprocs", "kind", "words"),
    [
        (0, ValueError, ["1 or more", "0"]),
        (-1, ValueError, ["1 or more", "-1"]),
        ("2", TypeError, ["whole number", "'2'", "str"]),
        (True, TypeError, ["whole number", "True"]),
        (2.0, TypeError, ["whole number", "2.0"]),
        (10**9, ValueError, ["do not fit into memory", "At most", "use nprocs="]),
    ],
)
def test_nprocs(nprocs, kind, words):
    with pytest.raises(kind) as error:
        ddpkit.spawn(fn, nprocs=nprocs)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ddpkit.spawn(fn, [1]), ["args must be a tuple", "list"]),
        (lambda: ddpkit.spawn(fn, 1), ["args must be a tuple", "int"]),
        (lambda: ddpkit.spawn("train"), ["spawn runs a function", "'train'"]),
        (lambda: ddpkit.spawn(fn(1)), ["spawn runs a function"]),
        (lambda: ddpkit.spawn(lambda: None), ["<lambda>()", "too many positional", "The first parameter is the rank"]),
        (lambda: ddpkit.spawn(fn, (1, 2)), ["fn(rank)", "args of 2"]),
        (lambda: ddpkit.spawn(lambda rank, a, b: None, (1,)), ["missing a required argument: 'b'"]),
        (lambda: ddpkit.spawn(fn, env=["A"]), ["env must be a dict", "list"]),
        (lambda: ddpkit.spawn(fn, env={"WORLD_SIZE": 2}), ["environment variables are strings", "'WORLD_SIZE': 2", "Write '2'"]),
        (lambda: ddpkit.spawn(fn, env={1: "a"}), ["environment variables are strings", "Write '1'"]),
    ],
)
def test_wrong_types(call, words):
    with pytest.raises(TypeError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start_method": "fork"}, ["'fork'", "forkserver", "spawn", "not offered"]),
        ({"start_method": "thread"}, ["'thread'", "forkserver"]),
        ({"env": {"": "x"}}, ["no environment can hold"]),
        ({"env": {"A=B": "x"}}, ["no environment can hold"]),
        ({"timeout": 0}, ["more than 0"]),
        ({"timeout": -3}, ["more than 0", "-3"]),
        ({"timeout": None}, ["more than 0", "None"]),
        ({"timeout": float("nan")}, ["more than 0", "nan"]),
        ({"timeout": float("inf")}, ["more than 0", "inf"]),
    ],
)
def test_wrong_values(options, words):
    with pytest.raises(ValueError) as error:
        ddpkit.spawn(fn, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_an_async_function_is_named():
    async def train(rank):
        pass

    with pytest.raises(TypeError, match="async function"):
        ddpkit.spawn(train)


def test_what_cannot_be_sent_is_named():
    lock, nested = threading.Lock(), {"deep": [1, {"steps": (i for i in range(3))}]}

    def uses_lock(rank):
        return lock

    def helper():
        return nested

    def uses_helper(rank):
        return helper()

    class Holder:
        def __init__(self):
            self.stream = threading.Lock()

    cases = [
        (lambda: ddpkit.spawn(uses_lock), ["the variable 'lock'", "uses_lock", "is a _thread.lock"]),
        (lambda: ddpkit.spawn(uses_helper), ["the variable 'nested', used by", "helper", "['deep'][1]['steps']", "generator"]),
        (lambda: ddpkit.spawn(lambda rank, a, b: None, (1, Holder())), ["args[1].stream", "_thread.lock"]),
        (lambda: ddpkit.spawn(lambda rank, x=lock: None), ["a default argument of", "_thread.lock"]),
    ]
    for call, words in cases:
        with pytest.raises(ddpkit.NotPicklable) as error:
            call()
        assert all(word in str(error.value) for word in words), error.value


def test_more_ranks_than_the_control_group_holds(monkeypatch):
    monkeypatch.setattr(limits, "memory_available", lambda: 310 << 20)
    with pytest.raises(ValueError, match=r"64 ranks do not fit.*310 MB are available. At most 10 fit here: use nprocs=10"):
        ddpkit.spawn(fn, nprocs=64)


def test_more_ranks_than_file_handles_allow(monkeypatch):
    monkeypatch.setattr(limits, "_hard_limit_of_files", lambda: 1024)
    monkeypatch.setattr(limits, "ranks_that_fit", lambda method: 10**6)
    with pytest.raises(ValueError, match=r"500 ranks need about 5,064 open files and this machine allows 1,024: use nprocs=96"):
        ddpkit.spawn(fn, nprocs=500)


GOOD = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_PORT": "123478"}, ["MASTER_PORT is 123478", "1 to 65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT is 'http'", "not a whole number"]),
        ({"RANK": "2"}, ["RANK is 2", "0 to 1"]),
        ({"RANK": "-1"}, ["RANK is -1", "0 to 1"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'", "how many ranks"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0", "1 or more"]),
        ({"RANK": "", "MASTER_ADDR": ""}, ["RANK and MASTER_ADDR", "not set"]),
    ],
)
def test_environment_variables_of_a_group(change, words):
    rendezvous.check_environment(GOOD)
    with pytest.raises(ValueError) as error:
        rendezvous.check_environment(GOOD | change)
    assert all(word in str(error.value) for word in words), error.value


def test_nccl_wants_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rendezvous.choose_backend("nccl", lambda: 2) == "nccl"
    with pytest.raises(ValueError, match=r'2 ranks and 1 GPU. Use backend "gloo", or 1 rank'):
        rendezvous.choose_backend("nccl", lambda: 1)
    with pytest.raises(ValueError, match=r'2 ranks and no GPUs. Use backend "gloo"'):
        rendezvous.choose_backend("nccl", lambda: 0)


def test_the_backend_where_none_is_asked_for(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rendezvous.choose_backend(None, lambda: 2) is None  # torch's own choice: nccl on GPUs, gloo on the CPU
    assert rendezvous.choose_backend(None, lambda: 1) == "gloo"  # nccl would refuse two ranks on one GPU
    assert rendezvous.choose_backend("gloo", lambda: 2) == "gloo"
    assert rendezvous.choose_backend("cpu:gloo,cuda:nccl", lambda: 0) == "cpu:gloo,cuda:nccl"
