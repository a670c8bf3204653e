"""`spawn` from plain Python: values, arguments, environment, output, state of a rank. Both start methods."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import psutil
import pytest

import ddpkit
from ddpkit import limits
from ddpkit.supervise import forkserver


def test_values_come_by_rank_and_a_group_forms(start_method):
    def fn(rank, factor):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([rank])
        dist.all_reduce(total)
        return rank * factor, dist.get_world_size(), int(total)

    run = ddpkit.spawn(fn, (10,), nprocs=3, start_method=start_method, view=False)
    assert run.values == [(0, 3, 3), (10, 3, 3), (20, 3, 3)]
    assert run[1] == run.values[1] and list(run) == run.values and len(run) == 3
    assert run.seconds > 0


def test_a_rank_finds_what_torchrun_sets(start_method):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]

    def fn(rank):
        return [os.environ[name] for name in names], os.environ["MASTER_PORT"].isdigit(), os.environ["ADDED"], os.environ["NOW"]

    os.environ["NOW"] = "set after the forkserver was started"
    try:
        run = ddpkit.spawn(fn, nprocs=2, start_method=start_method, env={"ADDED": "yes"}, view=False)
    finally:
        del os.environ["NOW"]
    assert run.values == [([str(r), str(r), "2", "2", "0", "127.0.0.1"], True, "yes", "set after the forkserver was started") for r in range(2)]


def test_the_classic_script_that_sets_address_and_port_itself_works(start_method):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def fn(rank, world_size):
        import torch
        import torch.distributed as dist

        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item()

    assert ddpkit.spawn(fn, (2,), start_method=start_method, view=False).values == [2.0, 2.0]


def test_a_port_given_by_env_is_hosted_by_rank_0(start_method):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def fn(rank):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return os.environ["MASTER_PORT"]

    assert ddpkit.spawn(fn, start_method=start_method, env={"MASTER_PORT": str(port)}, view=False).values == [str(port)] * 2


def test_torch_debug_level_given_by_env_holds_in_the_ranks(start_method):
    def fn(rank):
        import torch.distributed as dist

        return dist.get_debug_level().name

    assert ddpkit.spawn(fn, start_method=start_method, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, view=False).values == ["DETAIL"] * 2


def test_a_group_can_be_destroyed_and_made_again():
    def fn(rank):
        import torch.distributed as dist

        for _ in range(3):
            dist.init_process_group("gloo")
            dist.barrier()
            dist.destroy_process_group()
        return "made three times"

    assert ddpkit.spawn(fn, view=False).values == ["made three times"] * 2


def test_a_rank_looks_like_a_fresh_process(start_method):
    """Random state, threads, cores, standard streams, the main module: none is a copy of the forkserver's or of another rank's."""

    def fn(rank):
        import random

        import numpy
        import torch

        main = sys.modules["__main__"]
        return {
            "random": (random.random(), float(numpy.random.rand()), torch.rand(1).item()),
            "threads": torch.get_num_threads(),
            "main file": getattr(main, "__file__", None),
            "pid is group": os.getpgid(0) == os.getpid(),
            "cwd": os.getcwd(),
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "cuda untouched": not torch.cuda.is_initialized(),
            "stdin": sys.stdin.read(),
        }

    one, two = ddpkit.spawn(fn, start_method=start_method, view=False)
    for a, b in zip(one.pop("random"), two.pop("random"), strict=True):
        assert a != b
    expected = {
        "threads": max(1, limits.cores() // 2),
        "main file": None,
        "pid is group": True,
        "cwd": os.getcwd(),
        "sigint": True,
        "cuda untouched": True,
        "stdin": "",
    }
    assert one == expected and two == expected


def test_threads_share_the_cores_and_the_learners_choice_stays(monkeypatch):
    def fn(rank):
        import torch

        return torch.get_num_threads()

    for nprocs in (1, 2, 4):
        assert ddpkit.spawn(fn, nprocs=nprocs, view=False).values == [max(1, limits.cores() // nprocs)] * nprocs
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ddpkit.spawn(fn, view=False).values == [3, 3]


@pytest.mark.parametrize("megabytes", [0.06, 1, 200])
def test_large_arguments_and_values_pass(start_method, megabytes):
    data = os.urandom(1 << 10) * int(megabytes * 1024)

    def fn(rank, received):
        return received + bytes([rank])

    assert ddpkit.spawn(fn, (data,), start_method=start_method, view=False).values == [data + b"\0", data + b"\1"]


def test_tensors_are_copies_on_both_ways(start_method):
    import torch

    weights = torch.zeros(3)

    def fn(rank, weights):
        weights += rank + 1
        return weights

    one, two = ddpkit.spawn(fn, (weights,), start_method=start_method, view=False)
    assert weights.tolist() == [0, 0, 0]  # nothing is shared with the notebook
    assert one.tolist() == [1, 1, 1] and two.tolist() == [2, 2, 2]
    one += 5  # readable and writable after its rank has ended
    assert two.tolist() == [2, 2, 2] and not one.is_shared()


def test_many_tensors_need_no_file_handles():
    import resource

    def fn(rank):
        import torch

        return [torch.tensor([float(i)]) for i in range(2000)]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        values = ddpkit.spawn(fn, view=False).values
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [v[1999].item() for v in values] == [1999.0, 1999.0]


def test_the_kernels_environment_and_signals_are_unchanged():
    before = dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), os.getcwd(), list(sys.path)

    def fn(rank):
        os.environ["LEFT"] = "behind"
        os.chdir("/")

    ddpkit.spawn(fn, view=False)
    assert (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), os.getcwd(), list(sys.path)) == before


def test_output_is_kept_by_rank_as_a_terminal_would_show_it(start_method):
    def fn(rank):
        import subprocess

        print(f"line of {rank}")
        print("to stderr", file=sys.stderr)
        os.write(1, b"not \xff UTF-8\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        for i in range(5):
            print(f"\rprogress {i}", end="")
        sys.stdout.write("\nno newline at the end")

    run = ddpkit.spawn(fn, start_method=start_method, view=False)
    assert run.output == [f"line of {r}\nto stderr\nnot \\xff UTF-8\nfrom a child\nprogress 4\nno newline at the end\n" for r in range(2)]


def test_a_terminal_gets_lines_as_they_come(capsys):
    ddpkit.spawn(lambda rank: print("hello") or rank)
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 │ hello", "rank 1 │ hello"]


def test_a_run_in_words():
    run = ddpkit.spawn(lambda rank: print("hello") or rank, view=False)
    assert repr(run) == "rank 0 │ hello\nrank 1 │ hello\n<lambda> ran on 2 ranks and returned\nrank 0 → 0\nrank 1 → 1"
    assert repr(ddpkit.spawn(lambda rank: None, view=False)) == "<lambda> ran on 2 ranks"


def test_logged_numbers_arrive_by_rank(start_method):
    def fn(rank):
        import torch

        for step in range(3):
            ddpkit.log(step=step, loss=torch.tensor(0.5) * rank, done=step == 2)

    run = ddpkit.spawn(fn, start_method=start_method, view=False)
    assert run.metrics == [[{"step": s, "loss": 0.5 * r, "done": s == 2} for s in range(3)] for r in range(2)]


def test_log_prints_where_there_is_no_notebook(capsys, monkeypatch):
    ddpkit.log(step=1, loss=0.123456789)
    monkeypatch.setenv("RANK", "3")
    ddpkit.log(step=2)
    assert capsys.readouterr().out == "step=1  loss=0.123457\nrank 3 │ step=2\n"


def test_log_refuses_what_is_no_number():
    import torch

    with pytest.raises(TypeError, match=r"grads is a Tensor of shape \(3,\).*grads.mean"):
        ddpkit.log(grads=torch.ones(3))


def test_dataloader_workers_work_in_ranks_with_every_context(nothing_left):
    import torch

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return i

    Squares.__module__ = "__main__"  # as in a cell
    Squares.__qualname__ = "Squares"

    def keep(batch):
        return list(batch)

    keep.__module__, keep.__qualname__ = "__main__", "keep"

    def total(rank, context):
        from torch.utils.data import DataLoader, DistributedSampler

        data = Squares()
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2, collate_fn=keep, multiprocessing_context=context)
        return sum(sum(batch) for batch in loader)

    for context in (None, "fork", "spawn", "forkserver"):
        assert ddpkit.spawn(total, (context,), view=False).values == [20, 25], context


def test_many_runs_leave_nothing(nothing_left):
    for i in range(100):
        assert ddpkit.spawn(lambda rank, i: rank + i, (i,), nprocs=2, view=False).values == [i, i + 1]


def test_runs_at_the_same_time_do_not_meet(nothing_left):
    def fn(rank, offset):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.tensor([offset])
        for _ in range(20):
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    results = {}

    def call(offset):
        results[offset] = ddpkit.spawn(fn, (offset,), view=False).values

    threads = [threading.Thread(target=call, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {offset: [offset, offset] for offset in range(4)}


def test_only_loopback_is_listened_on():
    def fn(rank):
        import psutil
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        agent = psutil.Process().parent()
        found = [(c.laddr.ip, c.status) for p in (psutil.Process(), agent) for c in p.net_connections()]
        dist.barrier()
        return found

    for connections in ddpkit.spawn(fn, view=False):
        assert connections
        assert all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ip, _ in connections), connections


def test_a_forkserver_that_was_killed_is_started_again():
    ddpkit.spawn(abs, nprocs=1, view=False)
    old = psutil.Process(forkserver.pid)
    old.kill()
    old.wait()
    assert ddpkit.spawn(abs, view=False).values == [0, 1]
    assert forkserver.pid != old.pid


def test_a_script_without_main_guard_runs_once(tmp_path, start_method):
    import subprocess

    script = tmp_path / "exported.py"
    script.write_text(
        "import ddpkit\n"
        "class Point:\n"
        "    pass\n"
        "def hello(rank):\n"
        "    return rank, Point()\n"
        f"run = ddpkit.spawn(hello, start_method={start_method!r})\n"
        "print([v[0] for v in run], all(isinstance(v[1], Point) for v in run))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[0, 1] True\n", "")


def test_import_is_light():
    import subprocess

    code = "import sys, ddpkit; print([m for m in ('torch', 'numpy', 'IPython', 'matplotlib', 'ipywidgets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
