"""gloo asks for the machine's own name, which an offline laptop, a VPN or a container cannot tell; without IPv6 the log fills with warnings.

pytorch/pytorch#26166, pytorch/pytorch#121807
"""

from __future__ import annotations

import pytest

from tests.cases import containers

HELLO = """
import socket, sys
try:
    name = socket.gethostbyname(socket.gethostname())
except OSError:
    name = "not resolved"
try:
    with socket.socket(socket.AF_INET6) as s:
        s.bind(("::1", 0))
    six = "IPv6"
except OSError:
    six = "no IPv6"
import ddpkit

def hello(rank):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return rank, x.item()

print(name, six, ddpkit.spawn(hello, start_method=sys.argv[1]).values)
"""
RIGHT = "[(0, 2.0), (1, 2.0)]\n"
NAME = "echo no-such-name-anywhere > /proc/sys/kernel/hostname"
LOOPBACK = "ip link set lo up"
NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6"


@pytest.mark.parametrize(
    ("first", "spaces", "surroundings"),
    [
        (NAME, ("uts",), ("not resolved", "IPv6")),
        (f"{LOOPBACK} && {NO_IPV6}", ("net",), ("", "no IPv6")),
        (f"{NAME} && {LOOPBACK} && {NO_IPV6}", ("uts", "net"), ("not resolved", "no IPv6")),
    ],
    ids=["a host name that nobody resolves", "no network and no IPv6", "all of it"],
)
def test_loopback_is_enough(first, spaces, surroundings, tmp_path):
    done = containers.run(tmp_path, HELLO, "forkserver", first=first, spaces=spaces)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines(keepends=True)
    name, six = surroundings
    assert last.startswith(name) and last.endswith(f"{six} {RIGHT}")
    assert done.stderr == ""
    # torch asks a name server for the name of 127.0.0.1 where /etc/hosts does not tell it, and says so where none answers.
    assert [line for line in said if "The hostname of the client socket cannot be retrieved" not in line] == []
