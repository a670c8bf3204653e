"""From what ranks reported to words for a person: which failure came first, where in the user's own code, what followed from it."""

from __future__ import annotations

import linecache
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

from ddpkit import symptoms
from ddpkit.collectives import describe, first_difference
from ddpkit.errors import RankDied, RankError, RankFailed, RankFailure, RanksDisagree, RanksStuck
from ddpkit.messages import Calls, Ended, Failure, Stand
from ddpkit.payload import unpack_value

_FOLLOW_ON = re.compile(
    r"(RuntimeError|torch\.distributed\.\w+): (?!(?s:.*)urlopen error)(?s:.*)"
    r"(connection (was )?(closed|reset|refused)|broken pipe|socket closed|recvValue failed|sendBytes failed|failed to recv|peer .* (closed|gone))",
    re.IGNORECASE,
)
"""How gloo and the store say that another rank is gone: in a RuntimeError or one of torch's. Python's own ConnectionError is somebody else's: of
a download, of a DataLoader's worker."""
WAITS = "waits"
"""The kind of "failure" of a rank that has not failed and waits for others."""
LAST_FRAMES = 3
"""Frames of libraries that are shown where none is the user's."""
MANY_FRAMES = 16
"""Frames of the user's that are shown at most: half of them from the beginning, half from the end."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")} | {"<frozen", "<string>"})


def failure_of(message: Failure) -> RankFailure:
    """A rank's exception in plain words."""
    last = message.errors[-1]
    lines: list[str] = []
    anything_own = any(_is_own(frame) for error in message.errors for frame in error["frames"])
    for number, error in enumerate(message.errors):
        if number:
            lines.append("and while that was handled, or because of it:")
        if len(message.errors) > 1:
            lines.append(_headline(error["type"], error["text"]))
        lines += _lines(error["frames"], only_own=anything_own)
    if message.stage != "running the function":
        lines.insert(0, f"(while {message.stage})")
    return RankFailure(
        message.rank,
        last["type"],
        last["text"],
        tuple(lines),
        _cause(message),
        describe(message.last_call) if message.last_call else "",
        follows=bool(_FOLLOW_ON.match(_headline(last["type"], last["text"]))),
    )


def death_of(message: Ended) -> RankFailure:
    """A process that ended without a word, in plain words."""
    lines = _lines(_crash_frames(message.crash))
    if message.last_call is not None:
        lines.append(f"Its last collective was {describe(message.last_call)}.")
    if message.exitcode < 0:
        try:
            name = signal.Signals(-message.exitcode).name
        except ValueError:
            name = f"signal {-message.exitcode}"
        text = _SIGNALS.get(name, f"its process was ended by {name}")
        if message.memory:
            text = f"the system killed its process (SIGKILL, signal 9), because memory ran out: {message.memory}. Use fewer ranks or smaller batches"
        return RankFailure(message.rank, name, text, tuple(lines), died=True)
    text = f"its process ended itself with exit status {message.exitcode} before its function returned (os._exit?), so there is no value"
    return RankFailure(message.rank, f"exit status {message.exitcode}", text, tuple(lines), died=True)


def _crash_frames(crash: str) -> list[list[Any]]:
    """The main thread's frames from what faulthandler wrote (the newest first), the kit's and what called it left out."""
    frames: list[list[Any]] = []
    for block in re.split(r"\n\n|(?=Thread 0x|Current thread 0x)", crash):
        found = re.findall(r'File "(.+)", line (\d+) in (.+)', block)
        ours = [number for number, (file, _, function) in enumerate(found) if file.endswith("rank.py") and function == "main"]
        if ours:
            frames = [
                [file, int(line), function, linecache.getline(file, int(line)).strip()]
                for file, line, function in reversed(found[: ours[0]])
                if os.path.dirname(file) != os.path.dirname(__file__)
            ]
    return frames


_SIGNALS = {
    "SIGKILL": "its process was killed by SIGKILL (signal 9). Most often that is the system, "
    "because memory ran out: use fewer ranks or smaller batches",
    "SIGSEGV": "its process crashed with a segmentation fault (SIGSEGV, signal 11): an error in compiled code",
    "SIGABRT": "its process aborted (SIGABRT, signal 6): compiled code found an error that it could not go on from",
    "SIGBUS": "its process crashed with a bus error (SIGBUS, signal 7). Most often shared memory (/dev/shm) is full: "
    "use num_workers=0 or smaller batches",
    "SIGTERM": "its process was ended by SIGTERM (signal 15) from outside",
}


def error_of(
    failures: Sequence[RankFailure],
    nprocs: int,
    output: Sequence[str],
    elsewhere: Mapping[int, Stand] | None = None,
    returned: Sequence[int] = (),
    note: str = "",
) -> RankError:
    """The exception for a run with these failures: the root cause first, what followed from it after.

    `elsewhere`: where ranks that have not returned were when they were last asked; `returned`: those that have; `note`: a last line.
    """
    ordered = sorted(failures, key=lambda f: (f.follows, f.rank))
    first = ordered[0]
    if not first.died and symptoms.is_timeout(_headline(first.kind, first.text)):
        return _timed_out(ordered, nprocs, output, elsewhere or {}, returned)
    same = [f.rank for f in ordered[1:] if not f.follows and (f.kind, _numberless(f.text)) == (first.kind, _numberless(first.text))]
    others = [f for f in ordered[1:] if not f.follows and f.rank not in same]
    followers = [f for f in ordered[1:] if f.follows]
    who = f"rank {first.rank} of {nprocs}" if not same else f"{ranks_in_words([first.rank, *same])} of {nprocs}"
    last = output[first.rank].rstrip().rpartition("\n")[2] if first.died else ""
    if first.died:
        text = [f"{who} died: {first.text}.", *(f"  {line}" for line in first.lines)]
    elif first.kind == "SystemExit":
        text = [f"{who} called sys.exit({first.text or ''}), so there is no value.", *(f"  {line}" for line in first.lines)]
    else:
        text = [f"{who} failed: {_headline(first.kind, first.text)}", *(f"  {line}" for line in first.lines)]
    symptom = symptoms.find(_headline(first.kind, first.text) if not first.died else last)
    if symptom is not None:
        text += [f"Usually this means: {symptom.means}.", f"Try: {symptom.cure}."]
        if symptom.name == "/dev/shm is full" and os.path.isdir("/dev/shm"):
            text.append(f"/dev/shm has {shutil.disk_usage('/dev/shm').total >> 20:,} MB here.")
    if same:
        text.append(f"{'All ranks' if len(same) == nprocs - 1 else ranks_in_words([first.rank, *same])} failed in the same way.")
    text += [f"rank {f.rank} failed as well: {_headline(f.kind, f.text)}" for f in others]
    if followers:
        gone, wait = ([f.rank for f in followers if (f.kind == WAITS) == waits] for waits in (False, True))
        text += [f"Follow-on, only because a peer was gone: {ranks_in_words(gone)}."] if gone else []
        text += [f"Waiting for it in a collective, for ever: {ranks_in_words(wait)}."] if wait else []
        text += [f"rank {f.rank}'s last collective was {f.doing}." for f in followers if f.doing and first.died]
    if last:
        text.append(f"Its last words: {last}")
    text += [note] if note else []
    kind = RankDied if first.died or first.kind == "SystemExit" else RankFailed
    return kind("\n".join(text), ordered, output)


def followers_of(stuck: Sequence[Stand]) -> list[RankFailure]:
    """Ranks that stay, and wait for one that has failed."""
    return [
        RankFailure(stand.rank, WAITS, "for a rank that has failed", doing=describe(stand.collective) if stand.collective else "", follows=True)
        for stand in stuck
    ]


def stuck_of(
    stuck: Sequence[Stand],
    last: dict[int, Stand],
    returned: Sequence[int],
    name: str,
    output: Sequence[str],
    *,
    calls: Mapping[int, Calls] | None = None,
    note: str = "",
) -> RanksStuck:
    """The exception for ranks that wait for ever: rank by rank where it waits, who never comes, and what would cure it.

    `name`: the function that ranks have returned from; empty for ranks that stay, which have ended a cell. `calls`: the collectives of the ranks
    that have returned. `note`: a last line.
    """
    numbers = [stand.rank for stand in stuck]
    text = [f"{ranks_in_words(numbers)} wait{'s' * (len(numbers) == 1)} for ever: every rank waits for another or has ended."]
    failures = []
    for stand in stuck:
        what = describe(stand.collective) if stand.collective else "init_process_group, for other ranks to come"
        lines = _lines(stand.frames)
        text += [f"rank {stand.rank} waits in {what}", *(f"  {line}" for line in lines)]
        failures.append(RankFailure(stand.rank, WAITS, what, tuple(lines)))
    for rank in returned:
        called = last[rank].called if rank in last else {}
        groups = ", ".join(f"{count} in the {group}" for group, count in called.items())
        ended = f"has returned from {name}" if name else "has nothing to do"
        text.append(f"rank {rank} {ended}" + (f", after these collectives: {groups}" if groups else ""))
    difference = first_difference(stuck, calls)
    if difference is not None:
        (one, mine), (other, yours) = difference
        text += [f"rank {rank} called {describe(call)}" for rank, call in difference if rank in returned]
        cure = (
            f"The same call of the same group is {mine['op']} in rank {one} and {yours['op']} in rank {other}: "
            f"all ranks must call the same collectives in the same order. {_LOOK_FOR}"
            if mine["op"] != yours["op"]
            else "The same call has unlike tensors: shape and dtype must be equal in all ranks."
        )
    elif any(stand.collective is None for stand in stuck):
        cure = "A group forms when WORLD_SIZE ranks have come, each with another RANK, to the same MASTER_ADDR and MASTER_PORT."
        came = [stand.joins for stand in stuck if len(stand.joins) == 2]
        missing = sorted({rank for _, size in came for rank in range(min(size, len(came) + 9))} - {rank for rank, _ in came})
        if missing:
            cure += f" WORLD_SIZE is {came[0][1]}, and no process came with RANK {', '.join(map(str, missing[:8]))}{', …' * (len(missing) > 8)}."
    else:
        cure = f"Every rank must make the same calls, equally often. {_LOOK_FOR}"
    return RanksStuck("\n".join([*text, cure, *([note] if note else [])]), failures, output)


_LOOK_FOR = (
    "Look for a collective, a backward or a forward of the DDP model that only some ranks reach: under `if rank == 0` (evaluate model.module "
    "there), after a `break` (all ranks must decide alike), or in loops of unlike length (make them equal by a DistributedSampler or "
    "drop_last=True, or use join)."
)


def _timed_out(
    failures: Sequence[RankFailure], nprocs: int, output: Sequence[str], elsewhere: Mapping[int, Stand], returned: Sequence[int]
) -> RanksStuck:
    """A collective's own time limit has ended the wait before the kit was sure of a standstill, or while another rank still worked."""
    first = failures[0]
    waited = [f for f in failures if not f.follows and symptoms.is_timeout(_headline(f.kind, f.text))]
    text = [f"{ranks_in_words([f.rank for f in waited])} of {nprocs} waited longer than the timeout, and the others did not come."]
    for failure in waited:
        text += [f"rank {failure.rank} waited" + (f" in {failure.doing}" if failure.doing else ""), *(f"  {line}" for line in failure.lines)]
    for rank in range(nprocs):
        if rank in returned:
            text.append(f"rank {rank} has returned")
        elif rank in elsewhere and rank not in {f.rank for f in failures}:
            text += [f"rank {rank} was here", *(f"  {line}" for line in _lines(elsewhere[rank].frames))]
    text += [f"rank {f.rank} failed as well: {_headline(f.kind, f.text)}" for f in failures if f not in waited and not f.follows]
    text.append(_headline(first.kind, first.text))
    text.append(f"Try: {symptoms.find(_headline(first.kind, first.text)).cure}.")  # type: ignore[union-attr]  # it is the one that was found
    return RanksStuck("\n".join(text), failures, output)


def _numberless(text: str) -> str:
    """The same mistake in two ranks reads the same but for their numbers."""
    return re.sub(r"\d+", "#", text)


def drift_of(difference: str, output: Sequence[str]) -> RanksDisagree:
    """The exception for ranks whose copies of one DDP model are unlike at the end."""
    return RanksDisagree(
        "the ranks' copies of a DDP model have drifted apart: each rank has trained a model of its own.\n"
        f"{difference}\n"
        "Usually this means: a step went past the wrapper (model.module(x) instead of model(x), or a step under no_sync), "
        "or parameters were changed after the model was wrapped.\n"
        "Try: call the wrapper itself for each forward. If the copies are meant to differ (local SGD), switch this check off: "
        'env={"DDPKIT_RECORD": "0"}. What the ranks returned is in error.run.',
        (),
        output,
    )


def disagreement_of(difference: str, output: Sequence[str]) -> RanksDisagree:
    """The exception for ranks that did unlike things in one collective although nobody waited."""
    return RanksDisagree(
        "the ranks disagree about a collective, so what it left in their tensors may be garbage.\n"
        f"{difference}\n"
        "All ranks must call the same collectives in the same order, with tensors of equal size and dtype.",
        (),
        output,
    )


def ranks_in_words(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`."""
    words = [str(n) for n in sorted(numbers)]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _headline(kind: str, text: str) -> str:
    return f"{kind}: {text}" if text else kind


def _cause(message: Failure) -> BaseException | None:
    if not message.payload:
        return None
    try:
        cause = unpack_value(message.payload)
    except Exception:  # a user's class may do anything here; its text is known all the same
        return None
    return cause if isinstance(cause, BaseException) else None


def _is_own(frame: Sequence[Any]) -> bool:
    return not frame[0].startswith(_LIBRARIES)


def _lines(frames: list[list[Any]], only_own: bool = False) -> list[str]:
    """The user's own frames with their source. Frames of libraries are counted, not shown: learners cannot mend torch.

    Where no frame is the user's, the last of the libraries' are shown, unless `only_own`.
    """
    own = [_is_own(frame) for frame in frames]
    if not any(own) and not only_own:
        own[-LAST_FRAMES:] = [True] * len(own[-LAST_FRAMES:])
    shown = [number for number, mine in enumerate(own) if mine]
    if any(map(_is_own, frames)):  # what called the user's code (IPython, in ranks that stay) is nobody's business
        frames, own = frames[shown[0] :], own[shown[0] :]
        shown = [number - shown[0] for number in shown]
    for number in shown[MANY_FRAMES // 2 : -MANY_FRAMES // 2]:  # endless recursion: its beginning and its end tell all
        own[number] = False
    lines: list[str] = []
    skipped: list[str] = []
    for (filename, number, function, source), mine in zip(frames, own, strict=True):
        if mine:
            lines += _skipped(skipped)
            skipped = []
            where = f"{place_name(filename)}, line {number}" + ("" if function == "<module>" else f", in {function}")
            lines += [where, f"    {source}"] if source else [where]
        else:
            skipped.append(filename)
    return lines + _skipped(skipped)


def _skipped(filenames: list[str]) -> list[str]:
    if not filenames:
        return []
    packages = dict.fromkeys(_package(name) if name.startswith(_LIBRARIES) else place_name(name) for name in filenames)
    return [f"… {len(filenames)} call{'s' * (len(filenames) > 1)} inside {', '.join(packages)}"]


def _package(filename: str) -> str:
    for folder in _LIBRARIES:
        if "packages" in folder and filename.startswith(folder):
            return filename[len(folder) :].lstrip(os.sep).split(os.sep)[0].removesuffix(".py")
    return "Python's library"


def place_name(filename: str) -> str:
    """A file as a person knows it: "Cell In[3]" for a notebook's cell, else a path from here."""
    if cell := re.fullmatch(r"<(Cell In\[\d+\])>", filename):  # code of ranks that stay
        return cell[1]
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        names = getattr(shell.compile, "_filename_map", {})
        if filename in names:
            return f"Cell In[{names[filename]}]"
    relative = os.path.relpath(filename) if os.path.isabs(filename) and os.path.exists(filename) else filename
    return filename if relative.startswith("..") else relative
