"""`Ranks`: ranks that stay, and do what they are told, cell by cell. The magics `%ranks` and `%%ranks` are a thin layer above (magics.py)."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from ddpkit import errors, explain, limits, supervise
from ddpkit.collectives import Standstill
from ddpkit.messages import (
    Cell,
    Deliver,
    Done,
    Ended,
    Failure,
    Get,
    Interrupt,
    Message,
    Metrics,
    Output,
    Put,
    Shown,
    Stand,
    Start,
    Started,
    Trouble,
    Value,
    encode,
)  # fmt: skip
from ddpkit.payload import pack_call, unpack_value
from ddpkit.spawn import TIMEOUT, check_env, check_nprocs, check_start_method, check_timeout, notebook_state
from ddpkit.transcript import Transcript

KEEP = 4 << 20
"""Characters of a cell's output that are kept for each rank."""
LISTEN = 3.0
"""Seconds that ranks have to end a cell after an interrupt. Python code ends at once; a wait at C++ level does not hear of it."""


class Ranks:
    """Some ranks that live on between cells, each with names of its own, like a notebook in each.

        ranks = ddpkit.Ranks(4)
        ranks.run("import torch; x = torch.ones(2)")
        ranks["x"]                     # the value of x in each rank, as a list
        ranks.put(scale=3)             # a name in each rank
        ranks.stop()                   # or: with ddpkit.Ranks(4) as ranks: …

    Args:
        nprocs, start_method, env, timeout: as for `ddpkit.spawn`.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was started.
        LaunchFailed: the ranks could not be started.
    """

    def __init__(self, nprocs: int = 2, *, start_method: str | None = None, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT) -> None:
        check_nprocs(nprocs)
        self.nprocs = nprocs
        self._method = check_start_method(start_method)
        self._env = check_env(env)
        check_timeout(timeout)
        self._timeout = float(timeout)
        self._numbers = itertools.count(1)
        self.metrics: list[list[dict[str, Any]]] = [[] for _ in range(nprocs)]
        """What the ranks gave to `ddpkit.log`, by rank."""
        self._start()

    def _start(self) -> None:
        limits.check_ranks(self.nprocs, self._method)
        self._pids: list[int] = []
        self._dead: dict[int, errors.RankFailure] = {}
        self._stuck: set[int] = set()
        self._busy: set[int] = set()
        start = Start(
            nprocs=self.nprocs,
            start_method=self._method,
            overrides=self._env,
            threads=limits.threads_per_rank(self.nprocs),
            timeout=self._timeout,
            payload=b"",
            stays=True,
            **notebook_state(),
        )
        with supervise.Interrupts() as interrupts:
            job = supervise.Job(start)
            job.__enter__()
            self._job: supervise.Job | None = job
            self._end = weakref.finalize(self, job.__exit__, None)  # forgotten ranks do not stay
            trouble = ""
            for message in job.events():
                if isinstance(message, Started):
                    self._pids = message.pids
                    break
                if isinstance(message, Trouble):
                    trouble = message.text
                if interrupts.pressed:
                    break
        if not self._pids:
            why = trouble or job.why_gone() or "the agent is gone without a word (was it killed?)."
            self.stop()
            raise errors.LaunchFailed(f"The ranks could not be started: {why}")

    def stop(self) -> None:
        """End all ranks and everything they have started."""
        self._end()
        self._job, self._pids = None, []

    def restart(self) -> None:
        """End all ranks and start new ones, with nothing in them."""
        self.stop()
        self._start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def __len__(self) -> int:
        return self.nprocs

    def run(self, code: str, ranks: Iterable[int] | None = None, *, view: bool = True) -> Cells:
        """Run code in all ranks at once, or in some; returns what each of them showed.

        Raises:
            RankFailed: an exception; the ranks live on. RankDied: a rank is gone. RanksStuck: ranks wait for each other for ever, and only
                `restart` helps. KeyboardInterrupt: the cell was interrupted; the ranks live on.
        """
        name = f"<Cell In[{_cell_number(self._numbers)}]>"
        return self._do(lambda number: Cell(number, name, code), ranks, view)

    def __getitem__(self, expression: str) -> list[Any]:
        """The value of a name, or of any expression, in each rank: copies, by rank."""
        if not isinstance(expression, str):
            raise TypeError(f'ranks["name"] gives a name\'s value in each rank, as a list; it was given {expression!r}. For one rank: ranks["x"][0].')
        return self._do(lambda number: Get(number, expression), None, False).values

    def put(self, *, to: int | Iterable[int] | None = None, **names: Any) -> None:
        """Give names their values in all ranks, or in some (`to`): `ranks.put(lr=0.1)`, `ranks.put(to=0, root=True)`. Ranks get copies."""
        payload = pack_call(dict, (names,))
        self._do(lambda number: Put(number, payload), [to] if isinstance(to, int) else to, False)

    def status(self) -> list[dict[str, Any]]:
        """How each rank is.

        Returns:
            A dict for each rank: `rank`, `pid`, `state` ("idle", "busy", "stuck", or how it died), `group` (whether it has a default process group;
            None where it cannot be asked) and `memory` in MB (resident, shared pages included).
        """
        self._take_what_came()
        groups: list[Any] = [None] * self.nprocs
        if idle := [rank for rank in range(len(self._pids)) if rank not in self._dead.keys() | self._busy]:
            try:
                groups = self._do(lambda number: Get(number, _HAS_GROUP), idle, False).values
            except errors.RankError:
                pass  # one has died in this moment, and its state says so
        rows = []
        for rank, pid in enumerate(self._pids):
            state = self._dead[rank].kind if rank in self._dead else "stuck" if rank in self._stuck else "busy" if rank in self._busy else "idle"
            try:
                memory = psutil.Process(pid).memory_info().rss >> 20
            except psutil.Error:
                memory = 0
            rows.append({"rank": rank, "pid": pid, "state": state, "group": groups[rank], "memory": memory})
        return rows

    def __repr__(self) -> str:
        if self._job is None:
            return f"{self.nprocs} ranks, stopped"
        states = [row["state"] for row in self.status()]
        return f"{self.nprocs} ranks: " + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ddpkit import show

        bundle = {"text/plain": repr(self)}
        if show.somebody_watches():  # process ids and memory are other numbers each time, and no part of a saved notebook
            bundle["text/html"] = show.card(self.status())
        return bundle

    def _take_what_came(self) -> None:
        """What came since the last cell: a rank may have died."""
        for message in self._job.events(tick=0.0) if self._job is not None else ():
            if message is None:
                break
            self._hear(message, None)

    def _do(self, make: Callable[[int], Message], ranks: Iterable[int] | None, view: bool) -> Cells:
        """Send the same message to ranks and wait until all of them are done with it."""
        from ddpkit import show

        chosen = self._choose(ranks)
        self._check_able(chosen)
        assert self._job is not None
        number = next(self._numbers)
        cells = Cells(chosen, self.nprocs)
        waiting = set(chosen)
        self._busy |= waiting
        standstill = Standstill(self.nprocs)
        failures: dict[int, errors.RankFailure] = {}
        give_up = float("inf")
        with supervise.Interrupts() as interrupts:
            with show.watch_cells(cells) if view else show.nothing() as screen:
                self._job.tell(Deliver(sorted(waiting), encode(make(number))))
                for message in self._job.events():
                    if message is not None:
                        self._hear(message, cells)
                    if isinstance(message, Stand):
                        standstill.hear(message)
                    elif isinstance(message, Failure):
                        failures[message.rank] = explain.failure_of(message)
                    elif isinstance(message, (Done, Ended)):
                        standstill.moved()
                        if isinstance(message, Ended) or message.number == number:
                            waiting.discard(message.rank)
                    stuck = standstill.stuck(set(range(self.nprocs)) - waiting) if waiting else []
                    if interrupts.pressed and give_up == float("inf"):
                        give_up = time.monotonic() + LISTEN
                        self._job.tell(Interrupt(sorted(waiting)))
                    screen.update(cells)
                    if not waiting or stuck or time.monotonic() > give_up:
                        break
                cells.end()
                cells.shown = view
            return self._verdict(cells, failures, stuck, standstill, waiting, interrupts.pressed)

    def _hear(self, message: Message, cells: Cells | None) -> None:
        if isinstance(message, Metrics):
            self.metrics[message.rank].append(message.numbers)
        elif isinstance(message, Ended):
            self._dead[message.rank] = explain.death_of(message)
            self._busy.discard(message.rank)
        elif isinstance(message, Done):  # perhaps of an earlier cell, which had been given up
            self._busy.discard(message.rank)
            self._stuck.discard(message.rank)
        elif cells is not None:
            cells.hear(message)

    def _choose(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.nprocs)) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in chosen if not isinstance(rank, int) or not 0 <= rank < self.nprocs]
        if wrong or not chosen:
            raise ValueError(f"ranks go from 0 to {self.nprocs - 1}; it was given {wrong[0] if wrong else 'none'}.")
        return chosen

    def _check_able(self, chosen: Sequence[int]) -> None:
        if self._job is None:
            raise RuntimeError("these ranks are stopped: start new ones with %ranks 4, or ranks.restart().")
        self._take_what_came()
        if dead := [self._dead[rank] for rank in chosen if rank in self._dead]:
            raise explain.error_of(dead, self.nprocs, [""] * self.nprocs, note=RESTART)
        if stuck := [rank for rank in chosen if rank in self._busy]:
            raise errors.RanksStuck(f"{explain.ranks_in_words(stuck)} still wait{'s' * (len(stuck) == 1)} in what an earlier cell began.\n{RESTART}")

    def _verdict(
        self, cells: Cells, failures: dict[int, errors.RankFailure], stuck: Sequence[Stand], standstill: Standstill, waiting: set[int], pressed: bool
    ) -> Cells:
        failed = [*failures.values(), *(self._dead[rank] for rank in cells.ranks if rank in self._dead)]
        self._stuck |= {stand.rank for stand in stuck}
        note = ""
        if waiting:
            note = RESTART
            if pressed:
                print(f"{explain.ranks_in_words(sorted(waiting))} did not hear the interrupt: a wait at C++ level ends by itself or not. {RESTART}")
        if pressed:
            raise KeyboardInterrupt
        output = cells.output
        if waiting and not failed and not stuck:
            assert self._job is not None
            why = self._job.why_gone() or "the agent, which starts and watches the ranks, is gone without a word (was it killed?)."
            self.stop()
            raise errors.LaunchFailed(f"The ranks were lost: {why}", (), output)
        if failed:
            failed += explain.followers_of(stuck)
            raise explain.error_of(failed, self.nprocs, output, note=note)
        if stuck:
            idle = [rank for rank in range(self.nprocs) if rank not in waiting]
            raise explain.stuck_of(stuck, standstill.last(), idle, "", output, note=note)
        return cells


_HAS_GROUP = "'torch' in __import__('sys').modules and __import__('torch').distributed.is_initialized()"
RESTART = "Only a restart of the ranks helps: %ranks restart, or ranks.restart()."


class Cells:
    """What a cell did in each of its ranks. Shows itself: what all ranks say alike once, what differs side by side.

    Attributes:
        ranks: where it ran.
        output: what each rank of all printed, as text.
        values: for `ranks["name"]`: the value in each rank.
    """

    def __init__(self, ranks: Sequence[int], nprocs: int) -> None:
        self.ranks = list(ranks)
        self.values: list[Any] = [None] * nprocs
        self._pieces: list[list[Transcript | dict[str, Any]]] = [[] for _ in range(nprocs)]
        self.shown = False
        """It is on the screen already."""

    def hear(self, message: Message) -> None:
        """Take what a rank has printed, shown, or returned."""
        if isinstance(message, Output) and message.payload:
            pieces = self._pieces[message.rank]
            if not pieces or not isinstance(pieces[-1], Transcript):
                pieces.append(Transcript(KEEP))
            pieces[-1].feed(message.payload)  # type: ignore[union-attr]  # it is a Transcript now
        elif isinstance(message, Shown):
            self._pieces[message.rank].append(message.data)
        elif isinstance(message, Value):
            self.values[message.rank] = unpack_value(message.payload)

    def end(self) -> None:
        """Nothing more comes."""
        for piece in itertools.chain.from_iterable(self._pieces):
            if isinstance(piece, Transcript):
                piece.end()

    @property
    def output(self) -> list[str]:
        return ["".join(piece.text for piece in pieces if isinstance(piece, Transcript)) for pieces in self._pieces]

    def pieces(self, rank: int) -> Iterator[dict[str, Any]]:
        """What a rank printed and showed, in order, each as a MIME bundle."""
        for piece in self._pieces[rank]:
            yield {"text/plain": piece.text.rstrip("\n")} if isinstance(piece, Transcript) else piece

    def __repr__(self) -> str:
        from ddpkit.show import together

        return together.text_of(self)

    def _ipython_display_(self) -> None:
        if not self.shown:
            from IPython.display import display

            from ddpkit.show import together

            display(together.bundle_of(self), raw=True)


def _cell_number(numbers: Iterator[int]) -> int:
    """The number of the notebook's cell that runs; of a plain program, a count."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)  # the cell that runs is the newest; counters differ between versions
    return int(list(known.values())[-1]) if known else next(numbers)
