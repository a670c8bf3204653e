"""Ranks that stay: names live on, what they show comes together, faults are told and nothing is left."""

from __future__ import annotations

import html
import os
import re
import signal
import threading
import time

import psutil
import pytest

import ddpkit

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def two():
    with ddpkit.Ranks(2) as ranks:
        yield ranks


JOIN = "import os, torch, torch.distributed as dist; dist.init_process_group('gloo'); rank = dist.get_rank()"


def test_names_live_on_from_cell_to_cell(start_method):
    with ddpkit.Ranks(2, start_method=start_method) as ranks:
        ranks.run(JOIN, view=False)
        ranks.run("x = torch.tensor([rank + 1.0])", view=False)
        ranks.run("dist.all_reduce(x)", view=False)
        assert ranks["x.item()"] == [3.0, 3.0] and ranks["rank"] == [0, 1]
        ranks.run("only = True", [1], view=False)
        assert ranks["'only' in globals()"] == [False, True]


def test_what_all_show_alike_is_shown_once(two):
    same = two.run("print('hello')\n1 + 1", view=False)
    assert repr(same) == "ranks 0, 1 │ hello\nranks 0, 1 │ 2"
    unlike = two.run("import os\nprint('I am', os.environ['RANK'])", view=False)
    assert repr(unlike) == "rank 0 │ I am 0\nrank 1 │ I am 1"
    assert unlike.output == ["I am 0\n", "I am 1\n"]
    silent = two.run("y = 1", view=False)
    assert repr(silent) == ""
    assert repr(two.run("2", [1], view=False)) == "rank 1 │ 2"


def test_tensors_are_told_apart_at_a_glance(two):
    shown = repr(two.run("import torch; torch.arange(3.0)", view=False))
    assert shown.startswith("ranks 0, 1 │ tensor([0., 1., 2.])\nranks 0, 1 │ float32 [3] cpu #")
    shown = repr(two.run(f"{JOIN}; torch.nn.Parameter(torch.full((2,), float(rank)))", view=False))
    prints = [line.rpartition("#")[2] for line in shown.splitlines() if "float32 [2]" in line]
    assert len(prints) == 2 and len(set(prints)) == 2 and all(len(p) == 4 for p in prints)
    for odd in (
        "torch.ones(0)",
        "torch.ones(2, dtype=torch.bfloat16)",
        "torch.tensor(True)",
        "torch.ones(2, 3).t()",
        "torch.ones(1, dtype=torch.cfloat)",
    ):
        assert "#" in repr(two.run(odd, view=False))


def test_top_level_await_magics_figures_and_html(two):
    two.run("import asyncio\nawait asyncio.sleep(0)\nz = 7", view=False)
    assert two["z"] == [7, 7]
    assert "Wall time" in repr(two.run("%time sum(range(10))", view=False))
    from ddpkit.show import together

    shown = two.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2])\ndisplay(fig); plt.close()", view=False)
    assert "data:image/png;base64,iVBOR" in together.html_of(shown)
    shown = two.run("from IPython.display import HTML\nHTML('<b>bold</b>')", view=False)
    assert "<b>bold</b>" in together.html_of(shown)


def test_order_of_prints_and_displays(two):
    shown = two.run("for i in range(3):\n    print('printed', i)\n    display(i)", view=False)
    assert [line.partition("│ ")[2] for line in repr(shown).splitlines()] == ["printed 0", "0", "printed 1", "1", "printed 2", "2"]


class Made:
    def __init__(self, value):
        self.value = value


def test_values_go_in_and_come_out(two):
    import torch

    two.put(scale=3, made=Made(torch.ones(2)))
    two.put(to=1, scale=4)
    two.put(to=[0], flag=True)
    assert two["scale"] == [3, 4]
    back = two["made"]
    assert all(isinstance(one, Made) and one.value.tolist() == [1.0, 1.0] for one in back)
    big = two["'x' * 30_000_000"]
    assert [len(one) for one in big] == [30_000_000] * 2
    two.put(big=big[0])
    assert two["len(big)"] == [30_000_000] * 2
    with pytest.raises(ddpkit.NotPicklable, match="lock"):
        two.put(lock=threading.Lock())
    with pytest.raises(ddpkit.RankFailed, match="NameError: name 'nobody' is not defined"):
        two["nobody"]
    with pytest.raises(TypeError, match=r'ranks\["x"\]\[0\]'):
        two[0]


def test_an_exception_in_one_rank_leaves_all_usable(two):
    two.run(JOIN, view=False)
    with pytest.raises(ddpkit.RankFailed) as caught:
        two.run("print('before')\ndef f():\n    raise KeyError('x')  # the fault\nif rank == 1:\n    f()", view=False)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed: KeyError: 'x'\n  Cell, line 5\n") and "      raise KeyError('x')  # the fault" in text
    assert "IPython" not in text and "shell.py" not in text and caught.value.output == ("before\n", "before\n")
    two.run("t = torch.ones(1); dist.all_reduce(t)", view=False)
    assert two["t.item()"] == [2.0, 2.0]
    with pytest.raises(ddpkit.RankFailed, match="SyntaxError"):
        two.run("1 +", view=False)
    with pytest.raises(ddpkit.RankDied, match=r"called sys.exit\(3\)"):
        two.run("import sys; sys.exit(3)", view=False)
    assert two["1"] == [1, 1]


def test_ranks_that_wait_for_ever_and_a_restart(two):
    two.run(JOIN, view=False)
    began = time.monotonic()
    with pytest.raises(ddpkit.RanksStuck) as caught:
        two.run("if rank == 0:\n    dist.barrier()  # waits", view=False)
    text = str(caught.value)
    assert time.monotonic() - began < 10
    assert text.startswith("rank 0 waits for ever") and "      dist.barrier()  # waits" in text and "rank 1 has nothing to do" in text
    assert text.endswith("%ranks restart, or ranks.restart().")
    assert [(row["state"], row["group"]) for row in two.status()] == [("stuck", None), ("idle", True)]
    with pytest.raises(ddpkit.RanksStuck, match="rank 0 still waits"):
        two.run("1", view=False)
    assert repr(two.run("1", [1], view=False)) == "rank 1 │ 1"
    two.restart()
    assert two["'rank' in globals()"] == [False, False]
    assert [row["group"] for row in two.status()] == [False, False]


def test_a_failure_that_others_wait_for(two):
    two.run(JOIN, view=False)
    with pytest.raises(ddpkit.RankFailed) as caught:
        two.run("if rank == 1:\n    raise ValueError('no')\ndist.barrier()", view=False)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed: ValueError: no") and "Waiting for it in a collective, for ever: rank 0." in text
    assert text.endswith("ranks.restart().")


def test_a_dead_rank_is_said_at_once(two):
    with pytest.raises(ddpkit.RankDied) as caught:
        two.run("import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)", view=False)
    assert str(caught.value).startswith("rank 1 of 2 died: its process was killed by SIGKILL")
    with pytest.raises(ddpkit.RankDied, match="rank 1 of 2 died"):
        two.run("1", view=False)
    assert repr(two.run("1", [0], view=False)) == "rank 0 │ 1"
    os.kill(two.status()[0]["pid"], signal.SIGKILL)  # while it has nothing to do
    while psutil.pid_exists(two.status()[0]["pid"]) and two.status()[0]["state"] == "idle":
        time.sleep(0.01)
    with pytest.raises(ddpkit.RankDied, match="rank 0 of 2 died"):
        two.run("1", [0], view=False)
    two.restart()
    assert two["1"] == [1, 1]


@pytest.fixture
def harmless():
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(there):
    def press():
        while not there.exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


def test_an_interrupt_ends_the_cell_and_not_the_ranks(two, harmless, tmp_path):
    two.run("x = 5", view=False)
    two.put(there=tmp_path / "there")
    interrupt_when(tmp_path / "there")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        two.run("import time\nthere.touch()\nwhile True:\n    time.sleep(0.01)", view=False)
    assert time.monotonic() - began < 5
    assert two["x"] == [5, 5]


def test_an_interrupt_of_ranks_that_cannot_hear_it(two, harmless, tmp_path, capsys):
    """A collective waits at C++ level, where Python's signal handlers do not run."""
    two.run(JOIN, view=False)
    two.put(there=tmp_path / "there")
    interrupt_when(tmp_path / "there")
    with pytest.raises(KeyboardInterrupt):
        two.run("import time\nif rank == 0:\n    there.touch()\n    dist.barrier()\nelse:\n    while True:\n        time.sleep(0.01)", view=False)
    assert "rank 0 did not hear the interrupt" in capsys.readouterr().out
    with pytest.raises(ddpkit.RanksStuck, match="rank 0 still waits"):
        two.run("1", view=False)
    two.restart()


def test_huge_and_binary_output(two):
    shown = two.run("print('x' * 999 + '\\n' * 1, end='')\nfor _ in range(20_000):\n    print('y' * 500)", view=False)
    assert all("left out" in text and len(text) < 5_000_000 for text in shown.output)
    shown = two.run("import os; os.write(1, b'caf\\xe9\\n'); None", view=False)
    assert shown.output == ["caf\\xe9\n"] * 2


def test_two_sets_of_ranks_and_a_run_beside_them(two):
    def sums(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.tensor([rank + 1])
        dist.all_reduce(x)
        return int(x)

    two.run(f"{JOIN}\nx = torch.ones(1)\ndist.all_reduce(x)", view=False)
    with ddpkit.Ranks(3) as three:
        three.run(f"{JOIN}\nx = torch.ones(1)\ndist.all_reduce(x)", view=False)
        assert ddpkit.spawn(sums, view=False).values == [3, 3]
        assert three["x.item()"] == [3.0] * 3
    assert two["x.item()"] == [2.0] * 2


def test_forgotten_ranks_do_not_stay():
    ranks = ddpkit.Ranks(2)
    pids = [row["pid"] for row in ranks.status()]
    del ranks
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_agent_is_killed(two):
    (agent,) = {psutil.Process(row["pid"]).parent().pid for row in two.status()}
    timer = threading.Timer(0.3, os.kill, (agent, signal.SIGKILL))
    timer.start()
    with pytest.raises(ddpkit.LaunchFailed, match="The ranks were lost: the agent"):
        two.run("import time; time.sleep(60)", view=False)
    two.restart()
    assert two["1"] == [1, 1]


def test_stopped_ranks_say_so(two):
    two.stop()
    two.stop()
    assert repr(two) == "2 ranks, stopped"
    with pytest.raises(RuntimeError, match="stopped: start new ones"):
        two.run("1")
    two.restart()
    assert two["1"] == [1, 1]


@pytest.mark.parametrize(
    ("first", "other", "marked"),
    [
        ("own -2.18, weight 1.56", "own 2.18, weight 2.09", ["2.18", "2.09"]),
        ("[1.0, 2.0] loss 2.5", "[3.0, 2.0] loss 12.5", ["3.0", "12.5"]),
        ("float32 [1] cpu #268c", "float32 [1] cpu #98a3", ["98a3"]),
        ("tensor(-5.)", "tensor(-25.)", ["-25."]),
        ("tensor([0., 1., 2.])", "tensor([1., 2., 3.])", ["1.", "2.", "3."]),
        ("a b", "a new b", ["new "]),
        ("127.0.0.1 x-1 <a>", "127.0.0.1 x-2 <b>", ["-2", "b"]),
    ],
)
def test_what_differs_between_ranks_is_marked_whole_numbers_and_their_signs(first, other, marked):
    from ddpkit.show import together

    page = together._marked(first, other)
    assert re.findall(r"<mark[^>]*>(.*?)</mark>", page) == marked
    assert html.unescape(re.sub(r"</?mark[^>]*>", "", page)) == other


@pytest.mark.parametrize("ranks", [[2], [-1], [], ["0"]])
def test_ranks_that_are_not_there(two, ranks):
    with pytest.raises(ValueError, match="ranks go from 0 to 1"):
        two.run("1", ranks)


def test_numbers_that_are_logged(two):
    two.run("import ddpkit, os; ddpkit.log(rank=int(os.environ['RANK']))", view=False)
    assert two.metrics == [[{"rank": 0}], [{"rank": 1}]]


@pytest.mark.long
def test_two_hundred_cells_do_not_grow(two):
    two.run(JOIN, view=False)
    sizes = []
    for number in range(200):
        two.run(f"x = torch.ones(1000)\ndist.all_reduce(x)\nprint({number})\nx.sum()", view=False)
        if number in (50, 199):
            sizes.append([psutil.Process(row["pid"]).memory_info().rss for row in two.status()] + [psutil.Process().memory_info().rss])
    assert all(after - before < 8 << 20 for before, after in zip(*sizes, strict=True)), sizes
