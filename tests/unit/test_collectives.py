"""The record of collectives: ranks that did unlike things are named, also where nobody stood still; ranks that did the same are not."""

from __future__ import annotations

import pytest

import ddpkit
from ddpkit.collectives import KEPT, Record, describe, disagreement, first_difference, signature
from ddpkit.messages import Calls, Stand


def call(op="all_reduce", *shapes, dtype="float32", root=-1, group="default group", number=1):
    return {"op": op, "root": root, "dtype": dtype, "shapes": [list(s) for s in shapes or [[3]]], "group": group, "number": number}


def calls(rank, *made, groups=None):
    """What a rank reports at its end; `made` are its calls in the default group."""
    record = Record()
    for group, entries in ({"default group": made} if groups is None else groups).items():
        record.entries.extend(entry | {"group": group, "number": number} for number, entry in enumerate(entries, 1))
    return Calls(rank, record.calls(rank).groups)


def differ(*made):
    return disagreement({rank: calls(rank, *entries) for rank, entries in enumerate(made)})


SUM, OTHER = call("all_reduce", [3]), call("all_reduce", [5])


@pytest.mark.parametrize(
    "made",
    [
        (),
        ([],),
        ([], []),
        ([SUM], [SUM]),
        ([SUM, OTHER] * 50, [SUM, OTHER] * 50, [SUM, OTHER] * 50),
        ([call("all_reduce", [2, 3])], [call("all_reduce", [6])]),  # as many elements, and nothing else counts
        ([call("scatter", [2], root=0)], [call("scatter", [2], [2], root=0)]),  # unlike by design
        ([call("gather", [2], dtype="int64", root=0)], [call("gather", [9], root=0)]),
        ([call("all_to_all", [1], [2])], [call("all_to_all", [2], [1])]),
        ([call("barrier")], [call("barrier", [1], dtype="uint8")]),
        ([call("all_reduce", [2], [3])], [call("all_reduce", [2], [3])]),
    ],
)
def test_ranks_that_agree(made):
    assert differ(*made) == ""


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            ([SUM], [call("all_reduce", [3], dtype="float64")]),
            "rank 0 called all_reduce (float32 [3], number 1 of the default group)\n"
            "rank 1 called all_reduce (float64 [3], number 1 of the default group)",
        ),
        (
            ([SUM, SUM, OTHER], [SUM, SUM, SUM]),
            "rank 0 called all_reduce (float32 [5], number 3 of the default group)\n"
            "rank 1 called all_reduce (float32 [3], number 3 of the default group)",
        ),
        (
            ([SUM, call("all_gather")], [call("all_gather"), SUM]),
            "rank 0 called all_reduce (float32 [3], number 1 of the default group)\n"
            "rank 1 called all_gather (float32 [3], number 1 of the default group)",
        ),
        (
            ([SUM], [SUM], [OTHER]),
            "rank 0 called all_reduce (float32 [3], number 1 of the default group)\n"
            "rank 2 called all_reduce (float32 [5], number 1 of the default group)",
        ),
        (
            ([call("broadcast", root=0)], [call("broadcast", root=1)]),
            "rank 0 called broadcast (float32 [3], from rank 0, number 1 of the default group)\n"
            "rank 1 called broadcast (float32 [3], from rank 1, number 1 of the default group)",
        ),
        (([SUM, SUM], [SUM]), "rank 0 made 2 calls in the default group\nrank 1 made 1 calls in the default group"),
        (([call("all_reduce", [2], [3])], [call("all_reduce", [2])]), "rank 0 called all_reduce (float32 [2], [3], number 1 of the default group)"),
    ],
)
def test_ranks_that_disagree(made, words):
    assert differ(*made).startswith(words)


def test_groups_are_compared_by_themselves():
    both, one = "group of ranks 0, 1", "group of ranks 0, 2"
    same = {
        0: calls(0, groups={"default group": [SUM], both: [OTHER], one: [SUM]}),
        1: calls(1, groups={"default group": [SUM], both: [OTHER]}),
        2: calls(2, groups={"default group": [SUM], one: [SUM]}),
    }
    assert disagreement(same) == ""
    unlike = same | {2: calls(2, groups={"default group": [SUM], one: [OTHER]})}
    assert "number 1 of the group of ranks 0, 2" in disagreement(unlike)


def test_a_history_longer_than_what_is_kept():
    """Of very many calls the newest are compared, each with the other rank's call of the same number."""
    many = [SUM, OTHER] * KEPT
    one, other = calls(0, *many), calls(1, *many)
    assert one.groups["default group"]["first"] == KEPT + 1 and len(one.groups["default group"]["sequence"]) == KEPT
    assert len(one.groups["default group"]["kinds"]) == 2
    assert disagreement({0: one, 1: other}) == ""
    last = [*many[:-1], call("barrier")]
    assert f"rank 1 called barrier (float32 [3], number {2 * KEPT} of the default group)" in disagreement({0: one, 1: calls(1, *last)})


def test_histories_that_are_kept_from_unlike_numbers_on():
    """Rank 0 has room for fewer calls of the group, since it has called more in another one."""
    many = [SUM, OTHER] * (KEPT // 2)
    record = Record()
    record.entries.extend(e | {"number": n} for n, e in enumerate(many, 1))
    record.entries.extend(call(group="group of ranks 0, 2", number=n) for n in range(1, 502))
    one = Calls(0, record.calls(0).groups)
    assert one.groups["default group"]["first"] == 502
    assert disagreement({0: one, 1: calls(1, *many)}) == ""
    assert "number 1999" in disagreement({0: one, 1: calls(1, *many[:-2], OTHER, OTHER)})


def test_a_rank_whose_calls_of_a_group_are_all_forgotten():
    record = Record()
    record.entries.append(SUM)
    record.entries.extend(call(group="group of ranks 0, 2", number=n) for n in range(1, KEPT + 1))
    assert disagreement({0: Calls(0, record.calls(0).groups), 1: calls(1, SUM)}) == ""


def test_sends_and_receives_are_no_calls_of_a_group():
    record = Record()
    record.entries.append(call("send", root=1, number=0))
    assert record.calls(0).groups == {}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (call("all_reduce", [2, 3], number=7), "all_reduce (float32 [2, 3], number 7 of the default group)"),
        (call("all_reduce", []), "all_reduce (float32 [], number 1 of the default group)"),
        (call("all_gather", [1], [2], [3]), "all_gather (float32 [1], [2], [3], number 1 of the default group)"),
        (call("all_gather", [1], [2], [3], [4]), "all_gather (float32 [1], [2], [3], …, number 1 of the default group)"),
        (call("broadcast", root=2), "broadcast (float32 [3], from rank 2, number 1 of the default group)"),
        (call("send", [4], root=1, number=0), "send (float32 [4], to rank 1)"),
        (call("recv", [4], root=0, number=0), "recv (float32 [4], from rank 0)"),
        (call("barrier", group="group of ranks 0, 1") | {"shapes": []}, "barrier (number 1 of the group of ranks 0, 1)"),
        ({"op": "all_reduce", "number": 0, "group": ""}, "all_reduce"),  # an older torch tells no more
    ],
)
def test_a_call_in_words(made, words):
    assert describe(made) == words


def test_what_must_be_equal():
    assert signature(call("all_reduce", [2, 3], [])) == ("all_reduce", -1, "float32", 6, 1)
    assert signature(call("scatter", [2, 3], root=0)) == ("scatter", 0, "")


def test_the_first_difference_of_ranks_that_wait():
    def stand(rank, collective):
        return Stand(rank, 0.0, 0.0, True, collective, [], {})

    assert first_difference([stand(0, SUM), stand(1, SUM)]) is None
    assert first_difference([stand(0, SUM), stand(1, OTHER | {"number": 2})]) is None  # not the same call
    assert first_difference([stand(0, SUM), stand(1, None)]) is None
    assert first_difference([stand(0, SUM), stand(1, SUM), stand(2, OTHER)]) == ((0, SUM), (2, OTHER))


# Real ranks.


def test_unlike_dtypes_are_an_error_that_names_both(start_method):
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("begins", rank)
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))
        return "garbage"

    with pytest.raises(ddpkit.RanksDisagree) as caught:
        ddpkit.spawn(train, start_method=start_method, view=False)
    text = str(caught.value)
    assert "rank 0 called all_reduce (float32 [4], number 2 of the default group)" in text
    assert "rank 1 called all_reduce (int32 [4], number 2 of the default group)" in text
    assert caught.value.output == ("begins 0\n", "begins 1\n")


def test_the_record_can_be_switched_off():
    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))
        return "garbage"

    with pytest.raises(ddpkit.RanksDisagree):
        ddpkit.spawn(train, view=False)
    assert ddpkit.spawn(train, env={"DDPKIT_RECORD": "0"}, view=False).values == ["garbage", "garbage"]


def test_every_collective_of_ranks_that_agree_is_no_error():
    """Ranks whose tensors are unlike by design, too."""

    def train(rank):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        world = dist.get_world_size()
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(2, 2) if rank else x)  # as many elements
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=2)
        dist.all_gather([torch.empty(4) for _ in range(world)], x)
        dist.all_gather_into_tensor(torch.empty(4 * world), x)
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * world))
        dist.gather(x, [torch.empty(4) for _ in range(world)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(4), [torch.ones(4)] * world if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.empty(world), torch.ones(world))
        dist.all_gather_object([None] * world, {"rank": "x" * 100 * rank})  # pickles of unlike length
        dist.broadcast_object_list([rank], src=0)
        dist.gather_object("x" * rank, [None] * world if rank == 0 else None)
        dist.scatter_object_list([None], list(range(world)) if rank == 0 else None)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
        model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        for size in (2, 3 + rank):  # batches of unlike size are nobody's business
            model(torch.ones(size, 4)).sum().backward()
        with model.join():
            for _ in range(1 + rank):  # unlike numbers of batches, made good by join
                model(torch.ones(2, 4)).sum().backward()
        return "done"

    assert ddpkit.spawn(train, nprocs=3, view=False).values == ["done"] * 3


def test_groups_of_some_ranks():
    def train(rank, unlike):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = low if rank < 2 else high
        for _ in range(1 if rank < 2 else 3):  # the groups need not do the same
            dist.all_reduce(torch.ones(rank // 2 + 1), group=mine)
        if unlike and rank >= 2:
            dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank == 3 else torch.float32), group=mine)
        dist.barrier()
        return "done"

    assert ddpkit.spawn(train, (False,), nprocs=4, view=False).values == ["done"] * 4
    with pytest.raises(ddpkit.RanksDisagree) as caught:
        ddpkit.spawn(train, (True,), nprocs=4, view=False)
    text = str(caught.value)
    assert "rank 2 called all_reduce (float32 [2], number 4 of the group of ranks 2, 3)" in text
    assert "rank 3 called all_reduce (int32 [2], number 4 of the group of ranks 2, 3)" in text


@pytest.mark.parametrize("before", [1, 0])
def test_a_call_that_one_rank_makes_alone_and_does_not_wait_for(before):
    """Nobody stands still. Also where the other rank has never called anything on the group."""

    def train(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(before):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.all_reduce(torch.ones(2), async_op=True)
        return "done"

    with pytest.raises(ddpkit.RanksDisagree) as caught:
        ddpkit.spawn(train, view=False)
    assert f"rank 0 made {before + 1} calls in the default group" in str(caught.value)
    assert f"rank 1 made {before} calls in the default group" in str(caught.value)


def test_more_collectives_than_are_kept():
    def train(rank, count):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(1)
        for _ in range(count):
            dist.all_reduce(x)
        dist.all_reduce(torch.ones(1, dtype=torch.int32) if rank == 1 else x)

    with pytest.raises(ddpkit.RanksDisagree, match=rf"int32 \[1\], number {KEPT + 501} of the default group"):
        ddpkit.spawn(train, (KEPT + 500,), view=False)
