"""What `check` counts as waited for: only what the rank that reads or overwrites learns of, whatever library carries the plan."""

import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from executor_oracles import in_arenas, random_memory, run_plan_by_elements
from hand_plans import HandPlan
from message_oracle import run_messages

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.messages.messages import lay_messages
from shardroute.planner.check import check
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.plans import SOURCE, TARGET, Backend, Lane, Op, Plan, Steps
from shardroute.planner.ring.strategies import ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import PlanError


def whole(ranks: list[int], n: int) -> Fragments:
    """A row of n elements, all of it on each rank."""
    return place((1, n), Mesh.of({"x": len(ranks)}, ranks), [Replicate()])


def through_a_broadcast(driver: int, *, carries: bool) -> Plan:
    """Rank 1 has its slot read, then a broadcast over ranks 0 to 2 waits for that, and `driver` fills the slot anew behind it."""
    hand = HandPlan(slots=[64, 64])
    sides = (([0], [1], 4), ([0], [1, 2], 5), ([driver], [1], 6))
    tensors = [hand.tensor((1, n), whole(held, n), whole(needed, n)) for held, needed, n in sides]
    first, among, anew = (hand.bundle((t, [(0, 1), (0, n)])) for t, (_, _, n) in zip(tensors, sides, strict=True))
    filled = hand.copy(first, 0, 1, dst_at=0)
    read = hand.copy(first, 1, 1, [filled], 0, lane=Lane.LOCAL)
    via = hand.broadcast(among if carries else hand.bundle(), 0, [0, 1, 2], SOURCE, 1, [read])
    sent = via if carries else hand.broadcast(among, 0, [0, 1, 2], SOURCE, 1)
    again = hand.copy(anew, driver, 1, [via], dst_at=0)
    hand.copy(anew, 1, 1, [again], 0, lane=Lane.LOCAL)
    for rank in (1, 2):
        hand.copy(among, rank, rank, [sent], 1, lane=Lane.LOCAL)
    return hand.build(3)


def overtaken(*, waits: bool) -> Plan:
    """Rank 0 fills a slot of rank 1 with what nobody reads and says so; rank 1 then fills it itself, and sends that on."""
    hand = HandPlan(slots=[64])
    unread, mine = (hand.tensor((1, n), whole([k], n), whole([k + 1], n)) for k, n in ((0, 4), (1, 6)))
    bundles = [hand.bundle((t, [(0, 1), (0, n)])) for t, n in ((unread, 4), (mine, 6))]
    hand.copy(bundles[0], 0, 1)
    filled = hand.copy(bundles[0], 0, 1, dst_at=0)
    said = hand.copy(hand.bundle(), 0, 1, [filled], lane=Lane.CREDIT)
    own = hand.copy(bundles[1], 1, 1, [said, filled] if waits else [said], dst_at=0, lane=Lane.LOCAL)
    other = hand.copy(hand.bundle(), 2, 1, lane=Lane.CREDIT)
    hand.copy(bundles[1], 1, 2, [own, other], 0)
    return hand.build(3)


def goes_wrong(plan: Plan, n_runs: int) -> bool:
    """Whether one of so many runs over two-sided messages, each in another order, leaves wrong weights."""
    programs, buffers = compile_plan(plan)
    laid = lay_messages(plan, programs, buffers)
    memory = random_memory(buffers, 1)
    starts = in_arenas(memory, buffers)
    run_plan_by_elements(plan, memory)
    wanted, ends = in_arenas(memory, buffers), buffers.slots_at.tolist()
    for run in range(n_runs):
        arenas = [start.copy() for start in starts]
        run_messages(programs, laid, arenas, random.Random(run).randrange, eager=run % 2 > 0)
        if any((a[:end] != b[:end]).any() for a, b, end in zip(arenas, wanted, ends, strict=True)):
            return True
    return False


def told_by_another(plan: Plan) -> Plan:
    """A plan of a ring in which a rank that computes waits not for the keys that come, but for a message that says so."""
    steps, computes = plan.steps, plan.computes
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    arrives = (steps.op[owner] == Op.COMPUTE) & (steps.op[steps.after] == Op.COPY) & (steps.dst_at[steps.after] >= 0)
    entry = int(np.flatnonzero(arrives)[0])
    reader, writer = int(owner[entry]), int(steps.after[entry])
    later = np.arange(len(steps)) + (np.arange(len(steps)) >= reader)  # the message comes in before the reader
    after = [later[steps.after[a:b]].tolist() for a, b in zip(steps.after_ptr[:-1], steps.after_ptr[1:], strict=True)]
    after[reader] = [reader if step == writer else step for step in after[reader]]
    after.insert(reader, [writer])
    said = {
        "op": Op.COPY, "lane": Lane.CREDIT, "backend": Backend.PROCESSES, "bundle": steps.bundle[reader],
        "src": steps.src[writer], "dst": steps.dst[writer], "group": -1, "src_at": SOURCE, "dst_at": TARGET,
    }  # fmt: skip
    columns = {name: np.insert(getattr(steps, name), reader, value) for name, value in said.items()}
    ptr, flat = np.cumsum([0, *map(len, after)]), np.array(list(chain(*after)), np.int64)
    return replace(plan, steps=Steps(**columns, after_ptr=ptr, after=flat), computes=replace(computes, step=later[computes.step]))


@pytest.mark.parametrize("driver", [0, 2])
def test_a_wait_through_a_broadcast_that_carries_something_is_one_for_all_of_its_ranks(driver: int) -> None:
    plan = through_a_broadcast(driver, carries=True)

    proof = check(plan)

    assert proof.n_deliveries == 4
    assert not goes_wrong(plan, 60)


@pytest.mark.parametrize("driver", [0, 2])
def test_a_collective_that_carries_nothing_tells_nobody_of_what_it_waited_for(driver: int) -> None:
    with pytest.raises(PlanError, match="step 4 overwrites slot 0 of rank 1 without waiting for its last use"):
        check(through_a_broadcast(driver, carries=False))


def test_what_a_rank_overwrites_unread_it_must_have_waited_for_itself() -> None:
    good, bad = overtaken(waits=True), overtaken(waits=False)

    proof = check(good)

    assert proof.n_deliveries == 2
    assert not goes_wrong(good, 60)
    assert goes_wrong(bad, 1000)  # one in fifty or so does
    with pytest.raises(PlanError, match="step 3 overwrites slot 0 of rank 1 without waiting for its last use"):
        check(bad)


def test_a_rank_that_reads_what_came_must_have_waited_for_it_itself() -> None:
    call = Attention((32,), 2, 4, 2, 8, dtype="f32")
    plan = ring_plan(call, build_topology(load_machine("cpu-processes"), None, 2), "ring", Pass.FORWARD)
    check(plan)

    with pytest.raises(PlanError, match=r"reads k .* without waiting for step \d+ to write it"):
        check(told_by_another(plan))
