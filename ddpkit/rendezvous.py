"""The place where ranks find each other: the store, and the environment variables that lead to it.

As under torchrun, the store is not hosted by rank 0 but by the process that starts the ranks (the agent):

- The agent binds a socket to a free port of 127.0.0.1 and keeps it, so there is no race for the port, and nothing listens beyond loopback.
- TORCHELASTIC_USE_AGENT_STORE tells torch's `env://` that somebody else hosts the store; plain `dist.init_process_group("gloo")` works.
- gloo is told to stay on the loopback interface. Otherwise it asks what the machine's own name means, which offline laptops and containers
  often cannot say, and listens on whatever address that gives.
"""

from __future__ import annotations

import inspect
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any

LOOPBACK = "127.0.0.1"
OWN_STORE = ("MASTER_ADDR", "MASTER_PORT")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def listen(backlog: int) -> socket.socket:
    """A socket that listens on a free loopback port. Ranks can connect at once; they are served when `serve` is called."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(max(backlog, 128))
    return listener


def serve(listener: socket.socket, timeout: float) -> Any:
    """A store that answers on this socket from now on, in threads of torch. It lives as long as the object that is returned."""
    from torch.distributed import TCPStore

    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # from here on torch owns the socket
    )


def environment(rank: int, nprocs: int, port: int, threads: int) -> dict[str, str]:
    """What torchrun would set for this rank on a single machine, and what keeps gloo on loopback."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ddpkit",
        _AGENT_STORE: "True",
        "OMP_NUM_THREADS": str(threads),
    }
    if sys.platform.startswith("linux"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    elif sys.platform == "darwin":
        variables["GLOO_SOCKET_IFNAME"] = "lo0"
    return variables


JOINED, ALL_JOINED = "ddpkit/joined", "ddpkit/all joined"
"""In the group's store: how many ranks have joined it, and that all of them have."""
JOINING = 5.0
"""Seconds that a rank which leaves waits for others to join."""
KEPT_FROM_USER = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Variables that are the user's to choose: where the notebook has them set, the kit does not set them."""


def prepare_init(timeout: float, port: int) -> None:
    """In a rank: make `init_process_group` check its variables, find whoever hosts the store, and wait no longer than `timeout` seconds.

    `port`: where the agent's store listens.

    And `destroy_process_group` wait until all ranks have joined: gloo connects each rank with each, and one that has joined and leaves at once
    closes connections that others are just making.
    """
    import torch.distributed as dist

    kits_own = (LOOPBACK, str(port))
    original = dist.init_process_group
    signature = inspect.signature(original)
    times = itertools.count()

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if dist.is_initialized():
            raise ValueError(
                "init_process_group was called twice: this rank has a default process group already. "
                "Call dist.destroy_process_group() before making another one."
            )
        given = signature.bind(*args, **kwargs).arguments
        given["backend"] = choose_backend(given.get("backend"))
        given.setdefault("timeout", timedelta(seconds=timeout))
        if given.get("store") is None and given.get("init_method") in (None, "env://"):
            rank, world_size = given.get("rank", -1), given.get("world_size", -1)
            check_environment(os.environ, needs_rank=rank < 0, needs_world_size=world_size < 0)
            # A script may set MASTER_ADDR and MASTER_PORT itself, as most tutorials do, or spawn's `env` may. Then nobody hosts a store there yet:
            # rank 0 must.
            if tuple(os.environ.get(name) for name in OWN_STORE) != kits_own:
                os.environ.pop(_AGENT_STORE, None)
            elif time := next(times):
                # The agent's store still holds where the ranks listened for the last group: look in a part of it that is new.
                store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=given["timeout"]))
                given |= {"store": dist.PrefixStore(f"again_{time}", store), "rank": rank, "world_size": world_size, "init_method": None}
        result = original(**given)
        store = dist.distributed_c10d._get_default_store()
        if store.add(JOINED, 1) == dist.get_world_size():
            store.set(ALL_JOINED, "")
        return result

    original_destroy = dist.destroy_process_group

    @wraps(original_destroy)
    def destroy_process_group(group: Any = None) -> None:
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            try:
                dist.distributed_c10d._get_default_store().wait([ALL_JOINED], timedelta(seconds=JOINING))
            except RuntimeError:
                pass  # one of them will never join; its own error is the one to tell
        original_destroy(group)

    # Both names: `from torch.distributed import init_process_group` in a cell is pickled as a name of the module that defines it.
    modules: tuple[Any, Any] = (dist, dist.distributed_c10d)
    for module in modules:
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group


def check_environment(variables: Mapping[str, str], *, needs_rank: bool = True, needs_world_size: bool = True) -> None:
    """Raise ValueError for variables from which no process group can come: what was given, what is wanted, what to do."""
    wanted = [*(["RANK"] if needs_rank else []), *(["WORLD_SIZE"] if needs_world_size else []), *OWN_STORE]
    missing = [name for name in wanted if not variables.get(name)]
    if missing:
        raise ValueError(
            f"init_process_group needs the environment variable{'s' * (len(missing) > 1)} {' and '.join(missing)}, which "
            f"{'are' if len(missing) > 1 else 'is'} not set. A launcher (ddpkit.spawn, torchrun) sets all four; set by hand, each is a string."
        )
    port = _whole_number(variables, "MASTER_PORT", "the port where rank 0 listens, 1 to 65535")
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT is {port}, but ports go from 1 to 65535. Choose a free one, such as 29500.")
    if needs_world_size:
        world_size = _whole_number(variables, "WORLD_SIZE", "how many ranks there are in all, 1 or more")
        if world_size < 1:
            raise ValueError(f"WORLD_SIZE is {world_size}, but it is the number of ranks in all: 1 or more.")
        if needs_rank:
            rank = _whole_number(variables, "RANK", f"this rank's number, 0 to {world_size - 1}")
            if not 0 <= rank < world_size:
                raise ValueError(f"RANK is {rank}, but with WORLD_SIZE {world_size} ranks go from 0 to {world_size - 1}.")


def _whole_number(variables: Mapping[str, str], name: str, meaning: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"{name} is {variables[name]!r}, which is not a whole number. It says {meaning}.") from None


def gpus() -> int:
    """How many GPUs this process can use. Asking does not touch them, so a process that asks can still be copied."""
    import torch

    return int(torch.cuda.device_count())


def choose_backend(backend: object, count_gpus: Callable[[], int] = gpus) -> str | None:
    """The backend to use: the one that is asked for; where none is, gloo unless each rank of this machine has a GPU of its own.

    (torch would take nccl for whatever is on a GPU, also where two ranks share one, which NCCL refuses.) None leaves the choice to torch. Raises
    ValueError where nccl is asked for and there are too few GPUs: NCCL's own text names neither number.
    """
    if backend is not None and str(backend).lower() != "nccl":
        return str(backend)
    have, ranks = count_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if have >= ranks:
        return None if backend is None else str(backend)
    if backend is None:
        return "gloo"
    raise ValueError(
        f'backend "nccl" wants one GPU for each rank: here are {ranks} rank{"s" * (ranks != 1)} and {have or "no"} GPU{"s" * (have != 1)}. '
        f'Use backend "gloo"{f", or {have} rank" + "s" * (have != 1) if have else ""}.'
    )
