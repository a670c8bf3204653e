"""`spawn`: run a function in fresh ranks, once, and get back what each returned."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpkit import drift, errors, explain, limits, supervise
from ddpkit.collectives import Standstill, disagreement
from ddpkit.messages import Calls, Ended, Failure, Message, Metrics, Output, Stand, Start, Started, Trouble, Value, Weights
from ddpkit.payload import pack_call, unpack_value
from ddpkit.transcript import Transcript

START_METHODS = ("forkserver", "spawn")
TIMEOUT = 600.0
GRACE = 0.3
"""Seconds between a rank's failure and the end of the others. The same mistake reaches all ranks within milliseconds, and the report should
name them all."""
KEEP_IN_ALL = 256 << 20
"""Characters of output that a run keeps for all ranks together, at most `KEEP_EACH` for one."""
KEEP_EACH = 32 << 20


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 2,
    *,
    start_method: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    view: bool = True,
) -> Run:
    """Run `fn(rank, *args)` in `nprocs` new processes and wait for them. Like `torch.multiprocessing.spawn`, from a notebook too.

    `fn` may be anything callable: a function from a cell, a lambda, a closure. Each rank is a process of its own with a copy of what `fn`
    uses; nothing flows back but what it returns. The environment of a rank is the notebook's, plus what torchrun sets (RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so `torch.distributed.init_process_group("gloo")` needs no more. Without a backend
    it takes nccl for tensors on GPUs where each rank has a GPU of its own (`cuda:LOCAL_RANK`), and gloo otherwise; `run.devices` says which.

    Args:
        fn: called as `fn(rank, *args)` in each rank, rank from 0 to nprocs - 1.
        args: further arguments, copied into each rank.
        nprocs: number of ranks (the world size), 1 or more.
        start_method: "forkserver" (ranks are copies of a process that has torch loaded; milliseconds) or "spawn" (fresh interpreters;
            seconds). None takes "forkserver" where the platform has it. A rank behaves the same under both.
        env: environment variables to add, or to override those above, in all ranks. Strings by name.
        timeout: seconds that ranks may stand still waiting for each other; how long they may work is not bounded. It is the default
            `timeout` of process groups in the ranks.
        view: show what ranks print, while they run.

    Returns:
        The finished `Run`: `run.values`, `run.output`, `run.metrics`, `run.seconds`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was started. (`NotPicklable`, a TypeError: what cannot be sent, by name.)
        RankFailed: a rank raised an exception. RankDied: a rank's process ended without a value. RanksStuck: ranks wait for each other for
            ever, or longer than `timeout`. RanksDisagree: ranks called unlike collectives, or hold unlike copies of one DDP model, so the result
            is garbage. Each of these has the run, as far as it came, in `error.run`.
        LaunchFailed: no rank could be started.
        KeyboardInterrupt: the cell was interrupted; all ranks are gone by then.
    """
    check_nprocs(nprocs)
    _check_args(fn, args)
    method = check_start_method(start_method)
    overrides = check_env(env)
    check_timeout(timeout)
    if os.environ.get(supervise.INSIDE) == "rank":
        raise RuntimeError("ddpkit.spawn was called inside a rank. Call it from the notebook: a rank is one of the processes that it starts.")
    limits.check_ranks(nprocs, method)
    start = Start(
        nprocs=nprocs,
        start_method=method,
        overrides=overrides,
        threads=limits.threads_per_rank(nprocs),
        timeout=float(timeout),
        payload=pack_call(fn, args),
        **notebook_state(),
    )
    run = Run(getattr(fn, "__name__", type(fn).__name__), nprocs)
    run._follow(start, view)
    return run


class Run:
    """What a call of `spawn` did.

    Attributes:
        values: what each rank returned, by rank; `run[0]` is rank 0's.
        output: what each rank wrote to stdout and stderr, as text, by rank.
        metrics: what each rank gave to `ddpkit.log`, by rank: a list of dicts.
        seconds: from the call to the end of the last rank.
        nprocs: the number of ranks.
        devices: the device that is each rank's own, by rank: "cuda:0", "cuda:1", … (by LOCAL_RANK) where there is a GPU for each, else "cpu".
        name: the function's name.
    """

    def __init__(self, name: str, nprocs: int) -> None:
        self.name = name
        self.nprocs = nprocs
        self.values: list[Any] = [None] * nprocs
        self.metrics: list[list[dict[str, Any]]] = [[] for _ in range(nprocs)]
        self.devices = ["cpu"] * nprocs
        self.seconds = 0.0
        keep = min(KEEP_EACH, KEEP_IN_ALL // nprocs)
        self.transcripts = [Transcript(keep) for _ in range(nprocs)]
        self._shown = False
        self._stopped = False
        self._returned: set[int] = set()
        self._failures: dict[int, errors.RankFailure] = {}
        self._standstill = Standstill(nprocs)
        self._calls: dict[int, Calls] = {}
        self._weights: dict[int, Weights] = {}

    @property
    def output(self) -> list[str]:
        return [transcript.text for transcript in self.transcripts]

    def __getitem__(self, rank: int) -> Any:
        return self.values[rank]

    def __len__(self) -> int:
        return self.nprocs

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        from ddpkit import show

        return show.text_of(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ddpkit import show

        return show.bundle_of(self)

    def _follow(self, start: Start, view: bool) -> None:
        """Start the ranks and take in what they say until they are gone. Raises what the run ended in, where that is no value."""
        from ddpkit import show

        began = time.monotonic()
        trouble, started, stop_at = "", False, None
        error: errors.RankError | None = None
        watch = show.watch(self) if view else show.nothing()
        with supervise.Interrupts() as interrupts, watch as screen, supervise.Job(start) as job:
            for message in job.events():
                interrupts.check()
                now = time.monotonic()
                if isinstance(message, Trouble):
                    trouble = message.text
                elif isinstance(message, Started):
                    started = True
                    if message.gpus >= self.nprocs:
                        self.devices = [f"cuda:{rank}" for rank in range(self.nprocs)]
                elif message is not None:
                    self._take(message, screen)
                if not self._failures and stop_at is None and (stuck := self._standstill.stuck(self._returned)):
                    error = explain.stuck_of(stuck, self._standstill.last(), sorted(self._returned), self.name, self.output, calls=self._calls)
                    stop_at = now
                if self._failures and stop_at is None:
                    stop_at = now + GRACE
                if stop_at is not None and (now >= stop_at or len(self._failures) == self.nprocs):
                    stop_at = float("inf")
                    self._stopped = True
                    job.stop()
                screen.update(self)
            for rank, transcript in enumerate(self.transcripts):
                screen.lines(rank, transcript.end())
            self.seconds = time.monotonic() - began
            self._shown = view
            if error is None and not self._failures and len(self._returned) < self.nprocs:
                reason = trouble or job.why_gone() or "the agent, which starts and watches the ranks, is gone without a word (was it killed?)."
                what = "The ranks were lost while they ran" if started else "The ranks could not be started"
                error = errors.LaunchFailed(f"{what}: {reason}", (), self.output)
        error = error or self._verdict()
        if error is not None:
            error.run = self
            raise error

    def _verdict(self) -> errors.RankError | None:
        """What the run has ended in, once all ranks are gone; None where all is well."""
        if self._failures:
            elsewhere = {rank: stand for rank, stand in self._standstill.last().items() if rank not in self._returned}
            return explain.error_of(list(self._failures.values()), self.nprocs, self.output, elsewhere, sorted(self._returned))
        if unlike := disagreement(self._calls):
            return explain.disagreement_of(unlike, self.output)
        if unlike := drift.difference(self._weights):
            return explain.drift_of(unlike, self.output)
        return None

    def _take(self, message: Message, screen: Any) -> None:
        if isinstance(message, (Value, Failure, Ended)):
            self._standstill.moved()
        if isinstance(message, Output):
            screen.lines(message.rank, self.transcripts[message.rank].feed(message.payload))
        elif isinstance(message, Metrics):
            self.metrics[message.rank].append(message.numbers)
        elif isinstance(message, Value):
            try:
                self.values[message.rank] = unpack_value(message.payload)
                self._returned.add(message.rank)
            except Exception as error:  # a user's class may do anything while it is unpickled
                text = f"what it returned cannot be unpickled in the notebook: {type(error).__name__}: {error}"
                self._failures[message.rank] = errors.RankFailure(message.rank, type(error).__name__, text, cause=error)
        elif isinstance(message, Failure):
            self._failures[message.rank] = explain.failure_of(message)
        elif isinstance(message, Calls):
            self._calls[message.rank] = message
        elif isinstance(message, Weights):
            self._weights[message.rank] = message
        elif isinstance(message, Stand):
            self._standstill.hear(message)
        elif isinstance(message, Ended):
            # Ranks that we ended ourselves, because another had failed, are no failures of their own.
            if not self._stopped and message.rank not in self._returned | self._failures.keys():
                self._failures[message.rank] = explain.death_of(message)


def notebook_state() -> dict[str, Any]:
    """What ranks take over from the notebook, as it is now: fields of `Start`."""
    return {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "sys_path": [path or os.getcwd() for path in sys.path],
        "argv": _argv(),
        "sources": _sources(),
    }


def check_nprocs(nprocs: object) -> None:
    """Raise TypeError or ValueError for what is no number of ranks."""
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"nprocs is the number of ranks, a whole number such as 2; it is {nprocs!r}, a {type(nprocs).__name__}.")
    if nprocs < 1:
        raise ValueError(f"nprocs is the number of ranks and must be 1 or more; it is {nprocs}.")


def _check_args(fn: object, args: object) -> None:
    if not callable(fn):
        raise TypeError(f"spawn runs a function, fn(rank, *args) in each rank; it was given {fn!r}, a {type(fn).__name__}.")
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of the arguments after rank, such as args=(model,); it is a {type(args).__name__}.")
    if inspect.iscoroutinefunction(fn):
        raise TypeError("fn is an async function. A rank calls it and would get a coroutine: give a function that runs asyncio.run(...) itself.")
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in functions do not tell
    try:
        signature.bind(0, *args)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} cannot be called as {name}(rank, *args) with args of {len(args)}: {error}. "
            "The first parameter is the rank, the others come from args."
        ) from None


def check_start_method(start_method: object) -> str:
    """The start method to use. Raises ValueError for an unknown one, or one that this platform lacks."""
    if start_method is None:
        return "forkserver" if supervise.CAN_FORK else "spawn"
    if start_method not in START_METHODS:
        raise ValueError(
            f'start_method must be "forkserver", "spawn" or None (the faster one that this platform has); it is {start_method!r}.'
            + (" Forking the notebook itself is not offered: its threads and its GPU state do not survive it." if start_method == "fork" else "")
        )
    if start_method == "forkserver" and not supervise.CAN_FORK:
        raise ValueError('start_method="forkserver" needs a platform that can fork (Linux, macOS). Here, use "spawn" or None.')
    return str(start_method)


def check_env(env: object) -> dict[str, str]:
    """A copy of what was given as `env`. Raises TypeError or ValueError for what no environment can hold."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f'env must be a dict of strings, such as {{"MY_SETTING": "1"}}; it is a {type(env).__name__}.')
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            wrong = name if not isinstance(name, str) else value
            raise TypeError(
                f"environment variables are strings: env has {name!r}: {value!r}, and {wrong!r} is a {type(wrong).__name__}. Write {str(wrong)!r}."
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env has {name!r}: {value!r}, which no environment can hold: names are not empty, without '=', and nothing has a zero byte."
            )
    return dict(env)


def check_timeout(timeout: object) -> None:
    """Raise ValueError for what is no number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is the number of seconds that ranks may wait for each other, more than 0; it is {timeout!r}.")


def _argv() -> list[str]:
    """A script's own arguments. A kernel's are Jupyter's business, and would only confuse an argparse in a rank."""
    return [""] if "ipykernel" in sys.modules else list(sys.argv)


def _sources() -> dict[str, list[str]]:
    """Source lines that are on no disk, such as those of cells: a rank needs them for its tracebacks."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen")
    }
