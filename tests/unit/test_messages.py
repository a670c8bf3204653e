"""What processes say to each other: every message comes back as it was, and a link ends for both sides when one hangs up."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import fields

import pytest

from ddpkit import messages
from ddpkit.messages import (
    Ask,
    Calls,
    Cell,
    Deliver,
    Done,
    Ended,
    Failure,
    Get,
    Interrupt,
    Leave,
    Link,
    Metrics,
    Output,
    Put,
    Shown,
    Stand,
    Start,
    Started,
    Stop,
    Trouble,
    Value,
    Weights,
    decode,
    encode,
)  # fmt: skip

RAW = bytes(range(256)) * 3
CALL = {"group": "default group", "number": 3, "op": "all_reduce", "root": -1, "dtype": "float32", "shapes": [[2, 3], []]}
FRAMES = [["file é.py", 3, "train", "x = 日本"], ["<string>", 0, "<module>", ""]]


def start(**changes):
    given = {f.name: "" for f in fields(Start)} | {
        "nprocs": 2,
        "start_method": "spawn",
        "environment": {"PATH": "/bin", "ODD": "caf\udce9", "EMPTY": "", "MANY": "a\nb=c\t│"},
        "overrides": {"RANK": "7"},
        "cwd": "/tmp/\udcff",
        "sys_path": ["", "/a b"],
        "argv": [""],
        "sources": {"/tmp/ipykernel_1/2.py": ["def f():\n", "    return 'é'\n"]},
        "threads": 1,
        "timeout": 0.5,
        "payload": RAW,
    }
    return Start(**given | changes)


ALL = [
    start(),
    start(payload=b"", environment={}),
    Stop(),
    Leave(),
    Ask(),
    Started([1, 2, 3]),
    Output(1, RAW),
    Output(0, b""),
    Metrics(1, {"loss": 0.1, "step": 3, "name": "é", "best": True, "none": None, "far": float("inf")}),
    Value(0, RAW),
    Failure(1, "running the function", [{"type": "E", "text": "caf\udce9 \0", "frames": FRAMES}], 1.5, CALL, RAW),
    Failure(1, "unpickling the function", [], 0.0),
    Stand(1, 2.5, 0.25, True, CALL, FRAMES, {"default group": 3}),
    Stand(1, 2.5, 0.25, False, None, [], {}),
    Calls(1, {"default group": {"first": 1, "kinds": [CALL], "sequence": [0, 0]}}),
    Ended(1, -9, "Fatal Python error: é", CALL),
    start(stays=True, payload=b""),
    Deliver([0, 2], RAW),
    Interrupt([1]),
    Cell(7, "<Cell In[3]>", "x = 'é'\n"),
    Get(8, "x + 1"),
    Put(9, RAW),
    Shown(1, {"text/plain": "日本", "image/png": "aGk="}),
    Done(1, 7),
    Ended(0, 0),
    Ended(0, -9, memory="1 MB"),
    Weights(1, [{"number": 0, "ranks": [0, 1], "name": "Net", "parameters": {"weight": [-(2**62), 0.1, float("inf")]}}]),
    Trouble("it\nfailed"),
]


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_was(message):
    again = decode(encode(message))
    assert type(again) is type(message) and again == message


def test_every_kind_is_tried():
    assert {type(message) for message in ALL} == set(messages._KINDS.values())


def test_names_in_an_environment_may_be_any_bytes():
    name = os.fsdecode(b"caf\xe9")
    assert os.fsencode(decode(encode(start(environment={name: name}))).environment[name]) == b"caf\xe9"


@pytest.fixture
def links():
    ours, theirs = socket.socketpair()
    pair = Link.over(ours), Link.over(theirs)
    yield pair
    for link in pair:
        link.hang_up()
        link.close()


def test_messages_cross_a_link_in_order(links):
    here, there = links
    sender = threading.Thread(target=lambda: [here.send(message) for message in ALL])
    sender.start()
    assert [there.receive() for _ in ALL] == ALL
    sender.join()
    there.send(Stop())
    assert here.receive() == Stop()


def test_a_large_message_crosses(links):
    here, there = links
    big = Value(0, os.urandom(5_000_000))
    sender = threading.Thread(target=here.send, args=(big,))
    sender.start()
    assert there.receive() == big
    sender.join()


def test_many_threads_may_send(links):
    here, there = links
    senders = [threading.Thread(target=lambda n=n: [here.send(Output(n, bytes([n]) * 1000 * n)) for _ in range(50)]) for n in range(8)]
    for sender in senders:
        sender.start()
    got = [there.receive() for _ in range(400)]
    for sender in senders:
        sender.join()
    assert all(m.payload == bytes([m.rank]) * 1000 * m.rank for m in got)
    assert sorted(m.rank for m in got) == sorted(list(range(8)) * 50)


def receives_in_a_thread(link):
    got, began = [], threading.Event()

    def receive():
        began.set()
        got.append(link.receive())

    thread = threading.Thread(target=receive)
    thread.start()
    began.wait()
    return thread, got


@pytest.mark.parametrize("side", [0, 1])
def test_hanging_up_wakes_whoever_receives(links, side):
    """In another thread of this process, and at the other end."""
    thread, got = receives_in_a_thread(links[0])
    links[side].hang_up()
    thread.join(5)
    assert not thread.is_alive() and got == [None]
    assert links[1].receive() is None


def test_hanging_up_twice_and_sending_after_it(links):
    here, there = links
    here.hang_up()
    here.hang_up()
    with pytest.raises(OSError):
        there.send(Stop())
        there.send(Stop())


def test_hanging_up_wakes_whoever_sends(links):
    """A full connection, and nobody reads."""
    here, there = links
    failed = []

    def send():
        try:
            while True:
                here.send(Output(0, b"x" * 100_000))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    assert isinstance(there.receive(), Output)
    there.hang_up()
    thread.join(5)
    assert not thread.is_alive() and len(failed) == 1


@pytest.mark.parametrize("length", [0, 3, 8, 20])
def test_half_a_message_is_the_end(length):
    ours, theirs = socket.socketpair()
    data = encode(Output(1, b"x" * 50))
    theirs.sendall((len(data).to_bytes(8, "big") + data)[:length])
    theirs.close()
    link = Link.over(ours)
    assert link.receive() is None
    link.close()


def test_a_link_over_pipes():
    """As on Windows, where an agent is at a child's stdin and stdout."""
    to_there, to_here = os.pipe(), os.pipe()
    here = Link(os.fdopen(to_here[0], "rb"), os.fdopen(to_there[1], "wb"))
    there = Link(os.fdopen(to_there[0], "rb"), os.fdopen(to_here[1], "wb"))
    here.send(Value(1, RAW))
    assert there.receive() == Value(1, RAW)
    thread, got = receives_in_a_thread(there)
    here.hang_up()
    thread.join(5)
    assert not thread.is_alive() and got == [None]
    here.close()
    there.close()


def test_closing_gives_all_descriptors_back():
    import psutil

    before = psutil.Process().num_fds()
    ours, theirs = socket.socketpair()
    pair = Link.over(ours), Link.over(theirs)
    assert pair[0].descriptors() and pair[0].descriptors().isdisjoint(pair[1].descriptors())
    pair[0].hang_up()
    for link in pair:
        link.close()
    assert psutil.Process().num_fds() == before
