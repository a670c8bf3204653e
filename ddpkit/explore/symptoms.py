"""What do I see, and what does it mean? From a symptom to its cause and its cure."""

from __future__ import annotations

import re
from typing import Any

from ddpkit.explore import explorer
from ddpkit.symptoms import SYMPTOMS, Symptom
from ddpkit.symptoms import find as find_message

KINDS = (
    Symptom(
        "RanksStuck",
        "It stands still, and nobody reports an error",
        r"RanksStuck|waits? for ever",
        "a rank waits in a collective, or in init_process_group, for another that never calls it; a longer timeout or a faster network "
        "changes nothing",
        "find the line where each rank is (ddpkit's report, monitored_barrier, the flight recorder, py-spy) and let all ranks make the same "
        "calls, equally often",
    ),
    Symptom(
        "RankDied",
        "A rank is gone, without an error of its own",
        r"RankDied|SIG(KILL|SEGV|ABRT|BUS|TERM)|exitcode +: -\d+",
        "its process was ended: by the system, because memory ran out (SIGKILL); by a crash in compiled code (SIGSEGV, SIGABRT); or by its own "
        "os._exit",
        "after SIGKILL use fewer ranks or smaller batches; after a crash look at the line of yours that called the compiled code",
    ),
    Symptom(
        "follow-on",
        "Connection closed by peer, or: Connection reset by peer",
        r"(?i)connection (was )?(closed|reset)|broken pipe|socket closed",
        "this rank is well: it talked to another that is gone, so its error is a follow-on",
        "look for the rank that went first; it is the one without this message",
    ),
    Symptom(
        "RanksDisagree",
        "No error, and the numbers are wrong",
        r"RanksDisagree|drifted apart|disagree about a collective",
        "ranks gave unlike tensors, or the right ones in another order, to one collective; or the copies of a DDP model have drifted apart",
        "compare what each rank calls: order, shape and dtype; outside ddpkit, TORCH_DISTRIBUTED_DEBUG=DETAIL compares shape and dtype",
    ),
    Symptom(
        "RankFailed",
        "An exception in one rank, and the others are stopped",
        r"RankFailed|Traceback \(most recent call last\)",
        "the code of that rank failed; the others only lost a peer",
        "mend the line of yours that the report names first, and read the others as follow-on",
    ),
    Symptom(
        "LaunchFailed",
        "Nothing starts",
        r"LaunchFailed|do not fit into memory",
        "the processes of the ranks could not be made: too little memory, or the notebook's forkserver was killed",
        "use fewer ranks; ddpkit.doctor() says how many fit",
    ),
)
"""What a person sees before any message is read: the kit's own errors, by name."""
_UNKNOWN = (
    "No known symptom is in this text. Read the report from its first line: it names the rank and your own line. In a plain script, look for the "
    "rank that failed first."
)


def symptoms() -> None:
    """Show what a symptom means and what to try. A person chooses what they see, or pastes an error."""
    choices = {symptom.shown: symptom for symptom in (*KINDS, *SYMPTOMS)}

    def draw(see: str, pasted: str) -> tuple[str, None]:
        symptom = find(pasted) if pasted.strip() else choices[see]
        if symptom is None:
            return _UNKNOWN, None
        name = f"Its name in ddpkit: {symptom.name}.\n" if symptom in KINDS and symptom.name != "follow-on" else ""
        return f"You see: {symptom.shown}\n{name}Usually this means: {symptom.means}.\nTry: {symptom.cure}.", None

    def controls() -> dict[str, Any]:
        import ipywidgets as widgets

        wide = {"width": "min(48em, 100%)"}
        style = {"description_width": "9.5em"}
        return {
            "see": widgets.Dropdown(options=list(choices), description="I see", layout=wide, style=style),
            "pasted": widgets.Textarea(description="or paste an error", placeholder="RuntimeError: …", rows=2, layout=wide, style=style),
        }

    explorer.show(controls, {"see": KINDS[0].shown, "pasted": ""}, draw)


def find(text: str) -> Symptom | None:
    """The symptom in a pasted text: a message says more than the kind of error that it stands in."""
    return find_message(text) or next((symptom for symptom in KINDS if re.search(symptom.pattern, text)), None)
