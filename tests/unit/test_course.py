"""Predictions and exercises: right answers pass, known wrong ones are told what they are, and nothing that an answer does is raised."""

from __future__ import annotations

import linecache
import subprocess
import sys

import pytest

from ddpkit.course import checks
from ddpkit.course.exercise import catalogue
from ddpkit.course.predict import predict

WIDGET = "application/vnd.jupyter.widget-view+json"
IMPORTS = (
    "import os, time\nimport torch\nimport torch.distributed as dist\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
)


def cell(source, *names):
    """What a cell with this source defines, as in a notebook: in __main__, with its source at hand."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {"__name__": "__main__"}
    exec(compile(IMPORTS, "<imports>", "exec"), space)
    exec(compile(source, name, "exec"), space)
    found = tuple(space[name] for name in names)
    return found[0] if len(found) == 1 else found


@pytest.fixture
def verdict(capsys):
    """What `check` shows for a source, in plain Python."""

    def show(id, source):
        names = [function.__name__ for function in catalogue()[id].solution]
        checks.check(id, cell(source, *names))
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("id", list(catalogue()))
def test_the_reference_solution_passes_each_time(id, capsys):
    exercise = catalogue()[id]
    for _ in range(2):
        checks.check(id, exercise.solution if len(exercise.solution) > 1 else exercise.solution[0])
        assert capsys.readouterr().out == f"✓ {id} · {exercise.title}\n{exercise.shown}\n"


HELLO = "def hello(rank):\n    "
SQUARES = "seen = []\ndef squares(rank, n):\n    size = int(os.environ['WORLD_SIZE'])\n    "
LOADER = "def make_loader(rank, world_size, data, global_batch):\n    "
SAVE = "def save(path, model, optimizer, epoch):\n    torch.save({'m': model.module.state_dict(), 'o': optimizer.state_dict(), 'e': epoch}, path)\n"
LOAD = "def load(path, model, optimizer):\n    c = torch.load(path)\n    "
AVERAGE = "def average_gradients(model):\n    for p in model.parameters():\n        if p.grad is not None:\n            "
FAIR = "def fair_loss(losses):\n    total = torch.tensor(float(len(losses)))\n    dist.all_reduce(total)\n    "
MEAN, REPORT = "def mean(rank, part):\n    ", "def report(rank, loss):\n    "
TRAIN = "def train(rank, model, optimizer, batches):\n    "
STEP = "optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()"
COLLECT = "def collect(rank, scores):\n    "
SIZES = "n = torch.tensor(len(scores)); dist.all_reduce(n, op=dist.ReduceOp.{op}); n = int(n)\n    "
GATHER = "p = [torch.zeros(n) for _ in range(dist.get_world_size())]; dist.all_gather(p, {mine}); return torch.cat(p)"
TOTALS = "def totals(rank, metrics):\n    for x in {over}: dist.all_reduce(x)\n    "
WRAP = "def wrap(model):\n    return "
WRONG = {
    "00.rank": [
        (HELLO + "print(f'rank {rank + 1} of {os.environ[\"WORLD_SIZE\"]}')", "counts from 1"),
        (HELLO + "print(f'rank {rank}')", "prints the rank and not how many"),
        (HELLO + "print(f'rank {rank} of 2')", "written into the code"),
        (HELLO + "return f'rank {rank} of {os.environ[\"WORLD_SIZE\"]}'", "returns the text"),
    ],
    "00.values": [
        (SQUARES + "for i in range(rank, n, size): seen.append(i * i)", "a copy of its own"),
        (SQUARES + "print([i * i for i in range(rank, n, size)])", "prints the squares"),
        (SQUARES + "return [i * i for i in range(n)]", "does the whole work"),
        (SQUARES + "return [i * i for i in range(rank, n, 2)]", "right on 2 ranks only"),
    ],
    "05.average": [
        ("def average_gradients(model):\n    for p in model.parameters(): dist.all_reduce(p.grad)", "Skip it, on all ranks alike"),
        (AVERAGE + "dist.all_reduce(p.grad); p.grad /= world_size", "live in those ranks only"),
        (AVERAGE + "p.data += 1", "This changes the weights"),
        (
            "def average_gradients(model):\n    for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
            "        dist.all_reduce(p.grad)\n        p.grad /= dist.get_world_size()",
            "leave None where None is",
        ),
        (AVERAGE + "g = p.grad.clone(); dist.all_reduce(g); g = g / dist.get_world_size()", "still those of each rank"),
        (AVERAGE + "dist.reduce(p.grad, 0); p.grad /= dist.get_world_size()", "reduce leaves the result on one rank"),
        (AVERAGE + "dist.all_reduce(p.grad)", "the sums over the ranks"),
        (AVERAGE + "p.grad /= dist.get_world_size()", "nothing was added up"),
    ],
    "05.unequal": [
        (FAIR + "return losses.sum().item() / total", "no .item(), no .detach()"),
        (FAIR + "losses.sum() / total", "This returns nothing"),
        (FAIR + "return losses.sum()", "the sum over the part"),
        (FAIR + "return losses.sum() / total", "once too often"),
        (FAIR + "return losses.mean()", "the mean of means is not the mean"),
    ],
    "08.batch": [
        (LOADER + "return DataLoader(data, batch_size=global_batch // world_size)", "Every rank sees every image"),
        (LOADER + "return DataLoader(data, global_batch, sampler=DistributedSampler(data, shuffle=False))", "batch_size is per rank"),
        (LOADER + "return DataLoader(data, global_batch // world_size, sampler=DistributedSampler(data))", "something shuffles"),
    ],
    "08.resume": [
        (
            SAVE.replace("module.", "") + LOAD + "model.load_state_dict(c['m']); optimizer.load_state_dict(c['o']); return c['e']",
            "checkpoint is that of the wrapper",
        ),
        (SAVE + LOAD + "optimizer.load_state_dict(c['o']); return c['e']", "does not have the weights"),
        (SAVE + LOAD + "model.load_state_dict(c['m']); optimizer.load_state_dict(c['o']); return 0", "wrong epoch"),
        (SAVE + LOAD + "model.load_state_dict(c['m']); return c['e']", "momentum is lost"),
    ],
    "09.empty": [
        (MEAN + "x = torch.tensor(sum(part) / len(part)); dist.all_reduce(x); return x.item()", "which is 0"),
        (MEAN + "if not part: return\n    x = torch.tensor([sum(part), len(part)]); dist.all_reduce(x); return (x[0] / x[1]).item()", "with 0 and 0"),
        (MEAN + "x = torch.tensor([sum(part), len(part)]); dist.all_reduce(x); return (x[0] / x[1]).item()", "say dtype"),
        (
            MEAN + "x = torch.tensor(sum(part) / max(1, len(part))); dist.all_reduce(x); return x.item() / dist.get_world_size()",
            "a mean of means",
        ),
    ],
    "09.alone": [
        (REPORT + "if rank == 0:\n        dist.all_reduce(loss)\n        return loss.item() / dist.get_world_size()", "not every rank comes by"),
        (REPORT + "dist.all_reduce(loss)\n    if rank == 0: return loss.item()", "This is the sum"),
        (REPORT + "dist.all_reduce(loss)\n    return loss.item() / dist.get_world_size()", "Every rank reports"),
    ],
    "09.uneven": [
        (TRAIN + f"for batch in batches: {STEP}", "still waits for the others"),
        (TRAIN + f"model = model.module\n    for batch in batches: {STEP}", "went past the wrapper"),
        (TRAIN + f"for batch in batches[:1]: {STEP}", "Too few steps"),
    ],
    "09.gather": [
        (COLLECT + "n = len(scores); " + GATHER.format(mine="scores"), "still give tensors of unlike sizes"),
        (
            COLLECT + SIZES.format(op="MAX") + GATHER.format(mine="torch.nn.functional.pad(scores, (0, n - len(scores)))"),
            "zeros that filled the parts up",
        ),
        (COLLECT + SIZES.format(op="MIN") + GATHER.format(mine="scores[:n].contiguous()"), "cut to the shortest"),
    ],
    "09.order": [
        (TOTALS.format(over="metrics.values()") + "return metrics", "Nothing complains"),
        (TOTALS.format(over="[metrics[n] for n in sorted(metrics)]"), "returns nothing"),
    ],
    "09.unused": [
        (WRAP + "DDP(model)", "took no part in the loss"),
        (WRAP + "DDP(model).module", "the model inside the wrapper"),
        (WRAP + "model", "it is not wrapped"),
    ],
}


@pytest.mark.parametrize(("id", "source", "says"), [(id, *wrong) for id, wrongs in WRONG.items() for wrong in wrongs])
def test_a_known_wrong_answer_is_told_what_it_means(verdict, id, source, says):
    out = verdict(id, source)
    assert out.startswith(f"✗ {id}") and says in out


def test_every_known_mistake_has_its_wrong_answer():
    assert {id: len(wrongs) for id, wrongs in WRONG.items()} == {id: len(e.mistakes) + len(e.failures) for id, e in catalogue().items()}


def test_a_failure_shows_the_smallest_input_rank_by_rank(verdict):
    out = verdict("00.values", SQUARES + "return [i * i for i in range(n)]").splitlines()
    n = int(out[1].rpartition("=")[2].rstrip("."))
    assert out[1] == f"It fails on 2 ranks with n={n}." and 3 <= n <= 5
    assert f"  ✗ rank 1 returns: expected {[i * i for i in range(1, n, 2)]}, got {[i * i for i in range(n)]}" in out


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HELLO + "raise KeyError('x')", ["ended in an error on 1 rank", "KeyError: 'x'", "raise KeyError('x')"]),
        (HELLO + "os._exit(0)", ["ended in an error on 1 rank", "before its function returned"]),
        (HELLO + "os.kill(os.getpid(), 9)", ["ended in an error on 1 rank", "SIGKILL"]),
        (HELLO + "raise SystemExit", ["ended in an error", "sys.exit"]),
        ("def hello(): pass", ["Write hello(rank), then", "cannot be called so"]),
        ("hello = None", ["without calling them", "given None"]),
        ("import threading\nlock = threading.Lock()\ndef hello(rank): lock.acquire()", ["ended in an error on 1 rank", "lock"]),
    ],
)
def test_whatever_an_answer_does_is_shown_and_not_raised(verdict, source, says):
    out = verdict("00.rank", source)
    assert out.startswith("✗ 00.rank") and all(text in out for text in says), out


@pytest.mark.parametrize("body", ["while True: pass", "dist.init_process_group('gloo'); time.sleep(1000)"])
def test_an_answer_that_never_ends_is_ended(verdict, monkeypatch, body):
    monkeypatch.setattr(checks, "LIMIT", 1.0)
    assert "It did not finish within 1 s on 1 rank." in verdict("00.rank", HELLO + body)


@pytest.mark.parametrize(
    "value",
    [
        "[0, 1, 4, 9]",
        "(i * i for i in range(rank, n, size))",
        "type('Cheat', (), {'__eq__': lambda *_: True})()",
        "type('Cheat', (list,), {'__eq__': lambda *_: True})()",
        "[float(i * i) for i in range(rank, n, size)]",
    ],
)
def test_a_value_that_is_not_the_right_one_fails_whatever_it_claims(verdict, value):
    assert verdict("00.values", SQUARES + f"return {value}").startswith("✗ 00.values")


@pytest.mark.parametrize("value", ["torch.tensor([i * i for i in range(rank, n, size)], dtype=int)", "tuple(i * i for i in range(rank, n, size))"])
def test_the_form_of_a_right_value_does_not_matter(verdict, value):
    assert verdict("00.values", SQUARES + f"return {value}").startswith("✓ 00.values")


@pytest.mark.parametrize("source", [HELLO + "...", HELLO + "print(f'rank {rank} of', ...)", "hello = ...", "hello = eval('lambda rank: ...')"])
def test_an_unfinished_answer_is_told_so(verdict, source):
    assert verdict("00.rank", source) == 'Not finished yet: replace the ... and run this cell again. ddpkit.hint("00.rank") helps.\n'


def test_an_unfinished_one_of_two_is_told_so(verdict):
    assert "Not finished yet" in verdict("08.resume", SAVE + LOAD + "model.load_state_dict(...)")


@pytest.mark.parametrize(
    ("id", "source"),
    [
        ("09.alone", REPORT + "dist.reduce(loss, dst=0)\n    if rank == 0: return loss.item() / dist.get_world_size()"),
        (
            "09.uneven",
            TRAIN + "n = torch.tensor(len(batches)); dist.all_reduce(n, op=dist.ReduceOp.MIN)\n    for batch in batches[:n]: " + STEP,
        ),
        ("09.uneven", TRAIN + f"for batch in (batches * 4)[:8]: {STEP}"),
        ("09.gather", COLLECT + "parts = [None] * dist.get_world_size(); dist.all_gather_object(parts, scores); return torch.cat(parts)"),
        (
            "09.order",
            "def totals(rank, metrics):\n    all = [None] * dist.get_world_size(); dist.all_gather_object(all, metrics)\n"
            "    return {name: sum(one[name].item() for one in all) for name in metrics}",
        ),
    ],
)
def test_another_right_answer_passes(verdict, id, source):
    assert verdict(id, source).startswith(f"✓ {id}")


def test_an_ellipsis_as_an_index_is_no_placeholder(verdict):
    assert verdict("00.values", SQUARES + "x: tuple[int, ...] = ()\n    return (torch.arange(n)[..., rank::size] ** 2)").startswith("✓")


def test_hints_come_one_at_a_time_and_end_with_the_way_to_the_solution(capsys, monkeypatch):
    monkeypatch.setattr(checks, "_hints", {})
    for number in (1, 2, 3, 3):
        checks.hint("00.rank")
        out = capsys.readouterr().out
        assert out.startswith(f"Hint {number} of 3 · 00.rank\n") and ("ddpkit.solution" in out) == (number == 3)


def test_a_solution_is_its_source(capsys):
    checks.solution("08.resume")
    out = capsys.readouterr().out
    assert out.startswith("A solution · 08.resume\n\ndef save(path") and "model.module.state_dict()" in out and "def load(" in out


@pytest.mark.parametrize("call", [lambda: checks.check("0.rank", print), lambda: checks.hint("no"), lambda: checks.solution("")])
def test_an_unknown_exercise_names_the_known(call):
    with pytest.raises(ValueError, match=r"00\.rank, 00\.values, .*08\.batch, 08\.resume, 09\.empty"):
        call()


def test_predict_shows_question_and_options_and_not_the_answer(capsys):
    for _ in range(2):
        assert predict("How many?", ["1 of 5", "2 of <6>"], "2 of <6>", because="It is padded.") is None
        assert capsys.readouterr().out == "Predict: How many?\n  ○ 1 of 5\n  ○ 2 of <6>\nChoose, then run the next cell to see.\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("q", ["a"], "a", "b"), ValueError),
        (("q", ["a", "a"], "a", "b"), ValueError),
        (("q", ["a", "b"], "c", "b"), ValueError),
        (("q", "ab", "a", "b"), TypeError),
        (("q", [1, 2], 1, "b"), TypeError),
        ((None, ["a", "b"], "a", "b"), TypeError),
    ],
)
def test_predict_refuses_what_makes_no_question(args, error):
    with pytest.raises(error, match=r"predict|answer"):
        predict(*args)


@pytest.mark.parametrize("answer", ["a", "b"])
def test_a_choice_is_answered_once(answer):
    from ddpkit.course.predict import _ask

    _, buttons, verdict = _ask("q", ["a", "b"], answer, "Since 1 < 2.").children
    assert buttons.index is None and verdict.value == ""
    buttons.value = "a"
    assert buttons.disabled and "Since 1 &lt; 2." in verdict.value and 'role="status"' in verdict.value
    assert ("✓ Right" in verdict.value) == (answer == "a") and ("Not what happens. It is: b" in verdict.value) == (answer == "b")


def test_neither_torch_nor_widgets_are_loaded_before_they_are_needed():
    program = (
        "import sys, ddpkit; from ddpkit.course.exercise import catalogue; catalogue(); "
        "ddpkit.predict('q', ['a', 'b'], 'a', 'r'); print(ddpkit.doctor()); assert not {'torch', 'ipywidgets', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


QUESTION = """
from ddpkit.course.predict import predict
predict("How many?", ["1", "2"], "2", "Since.")
"""


def test_a_person_gets_controls_and_a_program_the_same_text_without(kernel):
    (alone,), (again,) = (kernel.check(QUESTION).displays for _ in range(2))
    assert alone == again and set(alone) == {"text/plain", "text/html"}
    assert alone["text/plain"] == "Predict: How many?\n  ○ 1\n  ○ 2\nChoose, then run the next cell to see."
    (watched,) = kernel.check(QUESTION, allow_stdin=True).displays
    assert watched.pop(WIDGET)["model_id"] and watched == alone


def test_nbclient_keeps_one_output_of_a_cell_with_a_check(kernel):
    import nbformat
    from nbclient import NotebookClient

    check = "from ddpkit.course.checks import check\ndef hello(rank):\n    ...\n\ncheck('00.rank', hello)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (QUESTION, check)])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (question,), (unfinished,) = (cell.outputs for cell in notebook.cells)
    assert question.output_type == unfinished.output_type == "display_data"
    assert question.data["text/plain"].startswith("Predict: How many?") and "Not finished yet" in unfinished.data["text/plain"]


def test_the_doctor_is_one_sentence_in_a_saved_notebook_and_a_card_before_a_person(kernel):
    code = "from ddpkit.doctor import doctor; doctor()"
    alone, watched = (kernel.check(code, allow_stdin=person).result for person in (False, True))
    assert alone == {"text/plain": "This machine is ready for distributed training."}
    assert watched.pop(WIDGET)["model_id"] and watched == alone
