"""`check` refuses every way in which a plan can fail to deliver, and names the culprit."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner import deliveries, piece_tables
from shardroute.planner.check import check
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.piece_tables import check_disjoint
from shardroute.planner.plans import TARGET, Boxes, Bundles, Op, Plan, Steps
from shardroute.planner.problems import Problem, one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import PlanError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


def problem():
    """Rows over ranks 0-1 to two replicas of columns: rank pairs in one domain of 8 and, by rank number, in the next."""
    return one_tensor(
        (8, 8),
        "f32",
        place((8, 8), Mesh.of({"x": 2}), [Shard(0)]),
        place((8, 8), Mesh.of({"dp": 3, "tp": 2}, [2, 3, 8, 9, 16, 17]), [Replicate(), Shard(1)]),
    )


def planned(strategy: str) -> Plan:
    return make_plan(problem(), build_topology(load_machine("dgx-h100"), None, 18), strategy)


def keep(plan: Plan, rows) -> Plan:
    """The plan with only some of its steps; waits for dropped steps are dropped too."""
    steps = plan.steps
    new: dict[int, int] = {}
    for i, old in enumerate(rows):
        new.setdefault(int(old), i)
    waits = [[new[a] for a in steps.after[steps.after_ptr[r] : steps.after_ptr[r + 1]].tolist() if a in new] for r in rows]
    columns = {n: c[rows] for n, c in steps.columns() if n not in ("after", "after_ptr")}
    after = np.array([a for w in waits for a in w], dtype=np.int32)
    return replace(plan, steps=Steps(**columns, after_ptr=np.cumsum([0, *map(len, waits)]), after=after))


def changed(plan: Plan, column: str, row: int, value: int) -> Plan:
    values = getattr(plan.steps, column).copy()
    values[row] = value
    return replace(plan, steps=replace(plan.steps, **{column: values}))


@pytest.mark.parametrize("strategy", ["direct", "domain-relay", "gather-broadcast"])
def test_a_plan_as_made_is_proved(strategy) -> None:
    proof = check(planned(strategy))

    assert proof.n_bytes == 3 * 8 * 8 * 4


def test_a_missing_step_is_found_with_the_rank_that_lacks_it() -> None:
    plan = planned("direct")
    lost = int(plan.steps.dst[0])

    with pytest.raises(PlanError, match=rf"nothing delivers tensor \[.*\] to rank {lost}"):
        check(keep(plan, np.arange(1, len(plan.steps))))


def test_a_second_delivery_is_found() -> None:
    plan = planned("direct")

    with pytest.raises(PlanError, match="both deliver"):
        check(keep(plan, np.append(np.arange(len(plan.steps)), 0)))


def test_a_sender_that_does_not_hold_the_piece_is_found() -> None:
    plan = planned("direct")
    other = 1 - int(plan.steps.src[0])

    with pytest.raises(PlanError, match=rf"step 0: rank {other} sends .* which it doesn't hold"):
        check(changed(plan, "src", 0, other))


def test_a_receiver_that_does_not_need_the_piece_is_found() -> None:
    with pytest.raises(PlanError, match=r"rank 7 gets tensor .* which it doesn't need"):
        check(changed(planned("direct"), "dst", 0, 7))


def test_a_relay_that_does_not_wait_for_its_input_is_found() -> None:
    plan = planned("domain-relay")
    steps = plan.steps
    hasty = replace(plan, steps=replace(steps, after=np.zeros(0, np.int32), after_ptr=np.zeros(len(steps) + 1, np.int64)))

    with pytest.raises(PlanError, match="but doesn't wait for it"):
        check(hasty)


def test_a_relay_of_what_never_arrives_is_found() -> None:
    plan = planned("domain-relay")
    relay = int(np.flatnonzero(np.diff(plan.steps.after_ptr))[0])

    with pytest.raises(PlanError, match=rf"step {relay}: rank 0 relays tensor .* which it never gets"):
        check(changed(plan, "src", relay, 0))


def test_a_wait_that_the_driver_can_not_observe_is_found() -> None:
    plan = planned("direct")
    steps = plan.steps
    strangers = next(
        (a, b)
        for b in range(len(steps))
        for a in range(b)
        if {int(steps.src[a]), int(steps.dst[a])}.isdisjoint({int(steps.src[b])})
    )
    ptr = np.zeros(len(steps) + 1, np.int64)
    ptr[strangers[1] + 1 :] = 1

    with pytest.raises(PlanError, match="in which none of its driving ranks takes part"):
        check(replace(plan, steps=replace(steps, after_ptr=ptr, after=np.array([strangers[0]]))))


def test_pieces_that_overlap_are_found() -> None:
    plan = planned("direct")
    boxes = plan.boxes[0]
    hi = boxes.hi.copy()
    hi[0, 0] += 1

    with pytest.raises(PlanError, match=r"overlaps another piece|is cut by the edge"):
        check(replace(plan, boxes=(Boxes(boxes.lo, hi),)))


def test_pieces_that_do_not_fill_a_needed_box_are_found() -> None:
    plan = planned("direct")
    boxes = plan.boxes[0]
    hi = boxes.hi.copy()
    hi[0, 0] -= 1

    with pytest.raises(PlanError, match="don't fill the needed box"):
        check(replace(plan, boxes=(Boxes(boxes.lo, hi),)))


def test_a_piece_that_an_edge_cuts_is_found() -> None:
    plan = planned("direct")
    whole = Boxes(np.array([[0, 0]]), np.array([[8, 8]]))
    bundles = Bundles(np.array([0, 1]), np.array([0]), np.array([0]), np.array([-1]))
    steps = keep(plan, np.arange(1)).steps

    with pytest.raises(PlanError, match="is cut by the edge of fragment"):
        check(replace(plan, boxes=(whole,), bundles=bundles, steps=replace(steps, bundle=np.zeros(1, np.int32))))


class TestStaging:
    """gather-broadcast goes through slots."""

    def test_reading_a_slot_without_waiting_is_found(self) -> None:
        plan = planned("gather-broadcast")
        n = len(plan.steps)
        hasty = replace(plan.steps, after=np.zeros(0, np.int32), after_ptr=np.zeros(n + 1, np.int64))

        with pytest.raises(PlanError, match="without waiting for the step that fills it"):
            check(replace(plan, steps=hasty))

    def test_reading_what_was_not_put_there_is_found(self) -> None:
        plan = planned("gather-broadcast")
        offset = plan.bundles.offset.copy()
        last = int(plan.steps.bundle[-1])
        rows = slice(int(plan.bundles.ptr[last]), int(plan.bundles.ptr[last + 1]))
        offset[rows] = offset[rows][::-1]

        with pytest.raises(PlanError, match="didn't put there"):
            check(replace(plan, bundles=replace(plan.bundles, offset=offset)))

    def test_a_slot_that_is_too_small_is_found(self) -> None:
        plan = planned("gather-broadcast")

        with pytest.raises(PlanError, match="overlap in slot 0, or leave its 8 bytes"):
            check(replace(plan, slot_bytes=np.full_like(plan.slot_bytes, 8)))

    def test_overwriting_a_slot_in_use_is_found(self) -> None:
        plan = planned("gather-broadcast")
        gather = int(np.flatnonzero(plan.steps.op == Op.ALL_GATHER)[0])
        twice = keep(plan, np.append(np.arange(len(plan.steps)), gather))

        with pytest.raises(PlanError, match="overwrites slot 0 of rank 0 without waiting for its last use"):
            check(twice)


class TestLargeNumbersOfPieces:
    """Proofs whose cost goes by pieces, not by the grid of all their edges nor by ranks that nobody uses."""

    @pytest.mark.parametrize("n_dims", [2, 3])
    def test_scattered_pieces_are_proved_apart(self, n_dims) -> None:
        n = 20_000
        corner = np.repeat(np.arange(n)[:, None], n_dims, axis=1)

        check_disjoint(Boxes(corner, corner + 1), (n,) * n_dims)

    def test_one_that_overlaps_among_scattered_ones_is_found(self) -> None:
        n = 20_000
        corner = np.repeat(np.arange(n)[:, None], 2, axis=1)
        hi = corner + 1
        hi[12_345] += 1

        with pytest.raises(PlanError, match=r"piece \[1234[56]:1234[67], .* overlaps another piece"):
            check_disjoint(Boxes(corner, hi), (n + 1, n + 1))

    @given(st.lists(st.tuples(*[st.tuples(st.integers(0, 8), st.integers(1, 4))] * 2), max_size=6))
    def test_parts_of_the_grid_say_what_the_whole_grid_says(self, drawn) -> None:
        lo = np.array([[a for a, _ in box] for box in drawn], dtype=np.int64).reshape(-1, 2)
        hi = lo + np.array([[n for _, n in box] for box in drawn], dtype=np.int64).reshape(-1, 2)
        boxes = zip(lo.tolist(), hi.tolist(), strict=True)
        cells = [(i, j) for (a, b), (c, d) in boxes for i in range(a, c) for j in range(b, d)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(piece_tables, "_MAX_CELLS", 1)
            found = nullcontext() if len(set(cells)) == len(cells) else pytest.raises(PlanError, match="overlaps another")
            with found:
                check_disjoint(Boxes(lo, hi), (12, 12))

    def test_a_scalar_that_is_two_pieces_is_refused(self) -> None:
        none = np.zeros((2, 0), dtype=np.int64)

        with pytest.raises(PlanError, match="overlaps another piece"):
            check_disjoint(Boxes(none, none), ())

    def test_ranks_that_hold_nothing_cost_nothing(self) -> None:
        plan = planned("direct")
        topology = build_topology(load_machine("cpu-processes"), 2**20)

        assert check(replace(plan, problem=replace(plan.problem, n_ranks=2**20), topology=topology)) == check(plan)

    def test_a_table_beyond_the_limit_is_refused(self, monkeypatch) -> None:
        monkeypatch.setattr(piece_tables, "MAX_TABLE", 10)

        with pytest.raises(PlanError, match=r"pieces between 8 ranks are more than can be checked \(10 pairs\)"):
            check(planned("direct"))

    def test_more_holders_and_needers_than_the_limit_are_refused(self, monkeypatch) -> None:
        monkeypatch.setattr(piece_tables, "MAX_PAIRS", 3)

        with pytest.raises(PlanError, match="ranks hold and need pieces more than 3 times, which is more than can be checked"):
            check(planned("direct"))

    def test_many_pieces_in_many_shards_are_checked_without_looking_at_each_shard_for_each(self) -> None:
        n = 4096
        shape = (n, 8)
        problem = one_tensor(
            shape, "u8", place(shape, Mesh.of({"x": n}), [Shard(0)]), place(shape, Mesh.of({"x": n}, range(n, 2 * n)), [Shard(0)])
        )
        plan = make_plan(problem, build_topology(load_machine("dgx-h100"), None, 2 * n), "direct")

        proof = check(plan)

        assert (proof.n_deliveries, proof.n_bytes) == (n, 8 * n)


def small_model(n_layers: int = 12) -> Plan:
    """Two kinds of tensors in many layers, which travel together."""
    shapes = {"up": (8, 16), "down": (16, 8)}
    tensors = tuple(Tensor(f"{layer}.{name}", shape, "f32") for layer in range(n_layers) for name, shape in shapes.items())
    replicas = Mesh.of({"dp": 2, "tp": 4}, range(4, 12))
    held = tuple(place(t.shape, Mesh.of({"x": 4}), [Shard(0)]) for t in tensors)
    needed = tuple(place(t.shape, replicas, [Replicate(), Shard(1)]) for t in tensors)
    names = tuple((t.name,) for t in tensors)
    problem = Problem(tensors, Layout(held, names), Layout(needed, names), 12)
    return make_plan(problem, build_topology(load_machine("dgx-h100"), None, 12), "domain-relay")


class TestTensorsThatFareAlike:
    def test_each_of_their_deliveries_counts(self) -> None:
        plan = small_model()
        arriving = (plan.steps.dst_at == TARGET) & (plan.steps.op == Op.COPY)

        proof = check(plan)

        assert proof.n_deliveries == int(plan.step_pieces[arriving].sum()) > len(plan.steps)
        assert proof.n_bytes == int(plan.step_bytes[arriving].sum())

    def test_a_piece_that_one_of_them_lacks_is_named(self) -> None:
        plan = small_model()
        row = int(np.argmax(plan.bundles.tensor == 5))
        bundle = int(np.searchsorted(plan.bundles.ptr, row, side="right")) - 1
        ptr = plan.bundles.ptr - (np.arange(len(plan.bundles.ptr)) > bundle)
        columns = (np.delete(column, row) for column in (plan.bundles.tensor, plan.bundles.piece, plan.bundles.offset))

        with pytest.raises(PlanError, match=f"nothing delivers {plan.problem.tensors[5].name} "):
            check(replace(plan, bundles=Bundles(ptr, *columns)))

    @pytest.mark.parametrize("at_once", [1, 40, 10**6])
    def test_the_verdict_is_the_same_however_many_are_followed_at_once(self, monkeypatch, at_once: int) -> None:
        plan = small_model()
        monkeypatch.setattr(deliveries, "_AT_ONCE", max(at_once, int(np.diff(plan.bundles.ptr).max())))

        assert check(plan).n_bytes == 2 * 24 * 8 * 16 * 4
        with pytest.raises(PlanError, match="nothing delivers"):
            check(keep(plan, np.arange(len(plan.steps) - 1)))
        with pytest.raises(PlanError, match=r"both deliver|relays"):
            check(keep(plan, np.append(np.arange(len(plan.steps)), len(plan.steps) - 1)))


def test_a_piece_that_is_sent_far_more_often_than_needed_is_refused_before_all_is_looked_at(monkeypatch) -> None:
    monkeypatch.setattr(deliveries, "_AT_ONCE", 3)
    plan = planned("direct")

    with pytest.raises(PlanError, match=r"\d+ copies deliver or relay tensor .*, which 18 ranks can't need"):
        check(keep(plan, np.append(np.arange(len(plan.steps)), [0] * 5)))


def test_a_destination_that_folds_onto_itself_is_found() -> None:
    plan = planned("direct")
    target = plan.problem.target.fragments[0]
    strides = target.strides.copy()
    strides[0] = 0
    folded = Layout((replace(target, strides=strides),), plan.problem.target.buffers)

    with pytest.raises(PlanError, match=r"buffer tensor of rank \d+: a fragment of tensor tensor puts two elements in one place"):
        check(replace(plan, problem=replace(plan.problem, target=folded)))
