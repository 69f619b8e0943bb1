"""Plans of attention calls compute what one device does, in every order that they allow; `check` proves and refuses them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ring_oracle import Interpreter, make_inputs

from shardroute.planner.check import check
from shardroute.planner.plans import Computes, Kind, Mode, Op, Plan, Steps
from shardroute.planner.ring.strategies import RING_STRATEGIES, Options, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import InputError, PlanError

TOPOLOGY = build_topology(load_machine("cpu-processes"), min_gpus=8)


@st.composite
def calls(draw, dtype="f64"):
    """Small attention calls over 1 to 8 ranks, packed or not."""
    n_ranks, packed = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)) if packed else [2 * n_ranks * draw(st.integers(1, 3))]
    kv = draw(st.sampled_from([1, 2, 4]))
    return Attention(
        tuple(lengths), n_ranks, kv * draw(st.sampled_from([1, 2])), kv, 2, batch=1 if packed else draw(st.integers(1, 2)),
        causal=draw(st.booleans()), packed=packed, layout=draw(st.sampled_from(SequenceLayout)), dtype=dtype,
    )  # fmt: skip


@st.composite
def plans(draw):
    """Plans of such calls by any strategy that takes them."""
    call, strategy = draw(calls()), draw(st.sampled_from(list(RING_STRATEGIES)))
    options = Options()
    if strategy == "hybrid":
        options = Options(ulysses=draw(st.sampled_from([d for d in range(1, call.n_ranks + 1) if call.n_ranks % d == 0])))
    if strategy == "all-gather":
        options = Options(head_stride=draw(st.sampled_from([d for d in (1, 2, 4) if call.n_kv_heads % d == 0])))
    try:
        return ring_plan(call, TOPOLOGY, strategy, draw(st.sampled_from(Pass)), options)
    except InputError:
        return ring_plan(call, TOPOLOGY, "ring", draw(st.sampled_from(Pass)))


@given(plans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_in_any_order_that_it_allows_a_plan_computes_what_one_device_does(plan: Plan, seed: int) -> None:
    interpreter = Interpreter(plan, make_inputs(plan.attention))

    interpreter.run(np.random.default_rng(seed))

    worst, n = interpreter.worst()
    assert n == interpreter.n_needed()
    assert worst < 1e-12


@given(plans())
@settings(max_examples=100)
def test_check_proves_every_plan_and_counts_its_outputs(plan: Plan) -> None:
    proof = check(plan)

    targets = zip(plan.problem.tensors, plan.problem.target.fragments, strict=True)
    assert proof.n_bytes == sum(int(f.n_elements.sum()) * t.itemsize for t, f in targets)


def planned(strategy: str = "ring", what: Pass = Pass.RECOMPUTE, **changes: object) -> Plan:
    options = {"ulysses": 2} if strategy == "hybrid" else {}
    call = replace(Attention((32,), 4, 4, 2, 2, dtype="f64"), **changes)
    return ring_plan(call, TOPOLOGY, strategy, what, Options(**options))


def without(plan: Plan, dropped: int) -> Plan:
    """The plan without a step; who waited for it waits for what it waited for."""
    steps, keep = plan.steps, [i for i in range(len(plan.steps)) if i != dropped]
    new = {old: i for i, old in enumerate(keep)}
    after = [steps.after[a:b].tolist() for a, b in pairwise(steps.after_ptr.tolist())]
    waits = [sorted({new[w] for v in after[i] for w in (after[v] if v == dropped else [v])}) for i in keep]
    columns = {n: c[keep] for n, c in steps.columns() if n not in ("after", "after_ptr")}
    flat_waits = np.array([w for found in waits for w in found], np.int32)
    rows = [row for row, step in enumerate(plan.computes.step.tolist()) if step != dropped]
    operands = [slice(int(plan.computes.ptr[row]), int(plan.computes.ptr[row + 1])) for row in rows]
    flat = np.concatenate([np.arange(s.start, s.stop) for s in operands])
    computes = Computes(
        np.array([new[int(plan.computes.step[row])] for row in rows]), plan.computes.kind[rows],
        np.cumsum([0, *(s.stop - s.start for s in operands)]),
        *(c[flat] for c in (plan.computes.bundle, plan.computes.at, plan.computes.mode)),
    )  # fmt: skip
    return replace(plan, steps=Steps(**columns, after_ptr=np.cumsum([0, *map(len, waits)]), after=flat_waits), computes=computes)


def without_wait(plan: Plan, entry: int) -> Plan:
    """The plan in which one entry of the `after` lists is left out."""
    steps = plan.steps
    owner = int(np.searchsorted(steps.after_ptr, entry, side="right")) - 1
    ptr = steps.after_ptr.copy()
    ptr[owner + 1 :] -= 1
    return replace(plan, steps=replace(steps, after=np.delete(steps.after, entry), after_ptr=ptr))


class TestBrokenPlans:
    """Each is refused, and the message names what is wrong."""

    @pytest.mark.parametrize("strategy", RING_STRATEGIES)
    def test_no_step_can_be_left_out(self, strategy) -> None:
        plan = planned(strategy)

        assert all(self.refused(without(plan, i)) for i in range(len(plan.steps)))

    @pytest.mark.parametrize("strategy", RING_STRATEGIES)
    def test_a_wait_that_is_left_out_is_found_unless_another_step_stands_for_it(self, strategy) -> None:
        plan = planned(strategy)

        for entry in range(len(plan.steps.after)):
            broken = without_wait(plan, entry)
            step, wait = int(np.searchsorted(plan.steps.after_ptr, entry, side="right")) - 1, int(plan.steps.after[entry])
            known = broken.steps.after[broken.steps.after_ptr[step] : broken.steps.after_ptr[step + 1]].tolist()
            ptr = plan.steps.after_ptr.tolist()
            of_known = [w for s in known for w in plan.steps.after[ptr[s] : ptr[s + 1]].tolist()]
            assert self.refused(broken) or wait in of_known

    def refused(self, plan: Plan) -> bool:
        try:
            check(plan)
        except PlanError:
            return True
        return False

    def test_a_missing_block_leaves_an_output_incomplete(self) -> None:
        plan = planned(what=Pass.FORWARD)
        last = int(plan.computes.step[-1])

        with pytest.raises(PlanError, match=r"o \[.*\] on rank 3 lacks some of the keys that its mask lets it meet"):
            check(without(plan, last))

    def test_a_block_that_is_used_twice_is_found(self) -> None:
        plan = planned(what=Pass.FORWARD, causal=False)
        rank = plan.group(int(plan.steps.group[plan.computes.step[0]]))[0]
        same = [r for r, s in enumerate(plan.computes.step.tolist()) if plan.group(int(plan.steps.group[s]))[0] == rank]
        bundle, at = plan.computes.bundle.copy(), plan.computes.at.copy()
        bundle[plan.computes.ptr[same[2]]], at[plan.computes.ptr[same[2]]] = (
            plan.computes.bundle[plan.computes.ptr[same[0]]], plan.computes.at[plan.computes.ptr[same[0]]],
        )  # fmt: skip

        with pytest.raises(PlanError, match=r"counts the same part of (o|lse) .* twice on rank 0"):
            check(replace(plan, computes=replace(plan.computes, bundle=bundle, at=at)))

    def test_a_slot_that_is_overwritten_early_is_found(self) -> None:
        plan = planned(what=Pass.FORWARD)
        credit = int(np.flatnonzero((plan.steps.op == Op.COPY) & (plan.step_bytes == 0))[0])
        entry = int(np.flatnonzero(plan.steps.after == credit)[0])

        with pytest.raises(PlanError, match=r"overwrites slot \d of rank \d without waiting for its last use"):
            check(without_wait(plan, entry))

    def test_a_sum_that_begins_anew_loses_what_was_there(self) -> None:
        plan = planned(what=Pass.FORWARD)
        mode = plan.computes.mode.copy()
        mode[np.flatnonzero(mode == Mode.UPDATE)[0]] = Mode.WRITE

        with pytest.raises(PlanError, match=r"both deliver (o|lse)"):
            check(replace(plan, computes=replace(plan.computes, mode=mode)))

    def test_gradients_from_an_output_that_is_not_complete_are_found(self) -> None:
        plan = planned(n_ranks=2)
        last_attend = int(plan.computes.step[np.flatnonzero(plan.computes.kind == Kind.ATTEND)[-1]])

        with pytest.raises(PlanError, match=r"reads (o|lse) .* before it is complete"):
            check(without(plan, last_attend))


COLUMNS = ["bundle", "src", "dst", "group", "src_at", "dst_at", "after"]
OPERANDS = ["kind", "bundle", "at", "mode"]


@given(plans(), st.data())
@settings(max_examples=60)
def test_what_check_proves_computes_what_one_device_does_however_it_was_made(plan: Plan, data: st.DataObject) -> None:
    """One number of the plan is changed: either that is refused, or it changes nothing that matters."""
    of_steps = data.draw(st.booleans())
    group, name = (plan.steps if of_steps else plan.computes), data.draw(st.sampled_from(COLUMNS if of_steps else OPERANDS))
    column = getattr(group, name).copy()
    assume(len(column) > 0)
    row = data.draw(st.integers(0, len(column) - 1))
    column[row] = data.draw(st.sampled_from(sorted(set(column.tolist()) | {int(column[row]) + 1})))
    try:
        changed = replace(plan, **{"steps" if of_steps else "computes": replace(group, **{name: column})})
        check(changed)
    except PlanError:
        return

    interpreter = Interpreter(changed, make_inputs(plan.attention))
    interpreter.run(np.random.default_rng(data.draw(st.integers(0, 1000))))

    worst, n = interpreter.worst()
    assert n == interpreter.n_needed()
    assert worst < 1e-12


class TestRefusals:
    """What can't be split is refused with the reason."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lengths": (36,)}, r"36 tokens can't be cut into 2 x 4 equal parts .* pad it to 40"),
            ({"lengths": (30,), "layout": "striped"}, r"30 tokens can't be cut into 4 equal parts .* pad it to 32"),
            ({"lengths": (30,), "layout": "contiguous"}, r"30 tokens can't be cut into 4 equal parts"),
            ({"n_heads": 6, "n_kv_heads": 4}, "every KV head must serve equally many"),
            ({"lengths": (5, 6), "packed": True, "batch": 2}, "packed documents with batch 2"),
            ({"lengths": (8, 8)}, "2 documents that aren't packed"),
            ({"lengths": ()}, "expected at least one"),
            ({"dtype": "i32"}, "attention in i32"),
            ({"dtype": "f64", "grad_dtype": "f32"}, "narrower than the f64"),
            ({"layout": "spiral"}, "sequence layout 'spiral' is not known"),
            ({"head_dim": 0}, "head_dim: expected a count from 1"),
        ],
    )
    def test_of_a_call(self, changes, message) -> None:
        with pytest.raises(InputError, match=message):
            replace(Attention((32,), 4, 4, 2, 2, dtype="f64"), **changes)

    @pytest.mark.parametrize(
        ("strategy", "options", "changes", "message"),
        [
            ("ulysses", Options(), {"n_heads": 2}, "2 heads are fewer than the Ulysses degree 4"),
            ("ulysses", Options(), {"n_heads": 6, "n_kv_heads": 6}, "6 heads don't split evenly over a Ulysses degree of 4"),
            ("ulysses", Options(), {"n_heads": 12, "n_kv_heads": 3}, "3 KV heads neither split evenly"),
            ("hybrid", Options(ulysses=3), {}, "a Ulysses degree of 3 doesn't divide the 4 ranks"),
            ("all-gather", Options(head_stride=3), {}, "a head stride of 3 doesn't divide the 2 KV heads"),
            ("ring", Options(ulysses=2), {}, "a Ulysses degree is for strategy hybrid only"),
            ("spiral", Options(), {}, "attention strategy 'spiral' is not known"),
        ],
    )
    def test_of_a_strategy(self, strategy, options, changes, message) -> None:
        call = replace(Attention((32,), 4, 4, 2, 2), **changes)

        with pytest.raises(InputError, match=message):
            ring_plan(call, TOPOLOGY, strategy, options=options)

    def test_of_a_hybrid_that_would_exchange_over_domains(self) -> None:
        topology = build_topology(load_machine("dgx-h100"), 2)
        call = Attention((64,), 16, 16, 16, 2)

        with pytest.raises(InputError, match="reaches over the NVLink domains of dgx-h100"):
            ring_plan(call, topology, "hybrid", options=Options(ulysses=16))

    def test_of_more_ranks_than_gpus(self) -> None:
        with pytest.raises(InputError, match="over 16 ranks, and cpu-processes has 8 GPUs"):
            ring_plan(Attention((64,), 16, 16, 16, 2), TOPOLOGY, "ring")


class TestTraffic:
    """Bytes that ranks send, by the closed forms of each scheme: P ranks, s tokens each, H and K heads of width d, e bytes."""

    def sent(self, plan: Plan) -> int:
        moves = (plan.steps.op == Op.COPY) & (plan.steps.src != plan.steps.dst)
        return int(plan.step_bytes[moves].sum())

    def test_a_full_ring_sends_every_block_to_all_others_and_its_sums_once_more_home(self) -> None:
        p, s, k, d, e = 4, 8, 2, 2, 8
        kv = 2 * s * k * d * e

        forward = planned(what=Pass.FORWARD, causal=False)
        backward = planned(what=Pass.BACKWARD, causal=False)

        assert self.sent(forward) == p * (p - 1) * kv
        assert self.sent(backward) == p * (p - 1) * kv + p * p * kv

    def test_a_contiguous_causal_ring_passes_a_block_to_later_ranks_only(self) -> None:
        kv = 2 * 8 * 2 * 2 * 8

        plan = planned(what=Pass.FORWARD, layout=SequenceLayout.CONTIGUOUS)

        assert self.sent(plan) == kv * (3 + 2 + 1 + 0)

    def test_ulysses_sends_all_but_its_own_share_of_queries_keys_values_and_outputs(self) -> None:
        p, s, h, d, e = 4, 8, 4, 2, 8
        call = Attention((32,), 4, 4, 4, 2, dtype="f64")

        plan = ring_plan(call, TOPOLOGY, "ulysses")

        assert self.sent(plan) == p * s * (2 * h + 2 * h) * d * e * (p - 1) // p

    def test_pass_q_sends_queries_round_and_outputs_with_their_lse_home(self) -> None:
        p, s, h, d, e = 4, 8, 4, 2, 8

        plan = planned("pass-q", Pass.FORWARD, causal=False)

        assert self.sent(plan) == p * (p - 1) * (s * h * d * e + s * h * d * e + s * h * e)

    def test_all_gather_gathers_keys_and_values_once_forward_and_reduces_their_gradients_backward(self) -> None:
        plan = planned("all-gather", Pass.BACKWARD)
        kv = 2 * 32 * 2 * 2 * 8

        gathers, reduces = (plan.step_bytes[plan.steps.op == op] for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))

        assert gathers.sum() == reduces.sum() == kv
        assert len(gathers) == 2  # one KV head at a time

    def test_what_a_slot_still_holds_is_not_sent_again(self) -> None:
        kv = 2 * 16 * 2 * 2 * 8

        plan = planned(n_ranks=2, causal=False)

        # Two blocks forward, none again backward, and both blocks' sums to the other rank and home.
        assert self.sent(plan) == 2 * kv + 2 * 2 * kv

    def test_a_rank_keeps_two_blocks_at_most_of_what_travels(self) -> None:
        plan = planned(what=Pass.FORWARD, causal=False)

        assert plan.peak_staging_bytes == 2 * (2 * 8 * 2 * 2 * 8)
