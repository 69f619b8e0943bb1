"""Attention plans on real processes: outputs and gradients equal one device's, and whoever makes a mistake is told."""

from dataclasses import replace

import numpy as np
import pytest
from attention_plans import planned
from hand_plans import rows_to_columns

from shardroute.executors.attention import contents as attention_contents
from shardroute.executors.attention.contents import difference, values
from shardroute.executors.attention.on_streams import why_no_attention
from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.run import run_plan
from shardroute.executors.transports.libraries import load_library
from shardroute.planner.plans import Kind, Mode, Op, Plan
from shardroute.planner.ring.overlaps import overlap_of
from shardroute.planner.ring.strategies import Options
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import SequenceLayout
from shardroute.planner.timelines import Timeline
from shardroute.topologies.errors import InputError


@pytest.mark.conformance
@pytest.mark.parametrize(
    "plan",
    [
        planned(),
        planned(what=Pass.BACKWARD, layout=SequenceLayout.STRIPED, n_ranks=8, n_kv_heads=8),
        planned(layout=SequenceLayout.CONTIGUOUS, n_ranks=3, lengths=(96,), batch=2, n_kv_heads=1),
        planned(lengths=(5, 17, 1, 40), packed=True, n_kv_heads=2),
        planned(lengths=(5, 17, 1, 40), packed=True, layout=SequenceLayout.STRIPED, causal=False, grad_dtype="f64", dtype="f32"),
        planned("all-gather", options=Options(head_stride=2), causal=False),
        planned("all-gather", lengths=(9, 30), packed=True, layout=SequenceLayout.CONTIGUOUS),
        planned("ulysses", n_ranks=8),
        planned("hybrid", options=Options(ulysses=2), layout=SequenceLayout.STRIPED),
        planned("pass-q", dtype="f32"),
        planned("ring", n_ranks=1, lengths=(7,), layout=SequenceLayout.CONTIGUOUS),
    ],
    ids=[
        "ring", "striped over 8", "contiguous batch", "packed", "packed f32 striped full", "all-gather", "packed all-gather",
        "ulysses with repeated KV heads", "hybrid", "pass-q f32", "one rank",
    ],
)  # fmt: skip
def test_outputs_and_gradients_equal_one_devices_in_every_trial(plan: Plan) -> None:
    result = run_plan(plan, timeout_s=60, repeats=2)

    assert result.mismatches == ()
    assert result.verified.mismatches == 0
    targets = zip(plan.problem.tensors, plan.problem.target.fragments, strict=True)
    assert result.verified.bytes == sum(int(f.n_elements.sum()) * t.itemsize for t, f in targets)
    allowed = "1e-10" if plan.attention.dtype == "f64" else "1e-05"
    assert result.verified.against.startswith("attention on one device in float64: largest difference")
    assert result.verified.against.endswith(f"{allowed} allowed")


def test_a_wrong_output_is_found_with_its_rank_and_tensor() -> None:
    plan = planned(what=Pass.FORWARD)
    computes = plan.computes
    update = int(np.flatnonzero(computes.mode == Mode.UPDATE)[0])
    mode = computes.mode.copy()
    mode[update : update + 2] = Mode.WRITE  # o and lse begin anew, so that earlier keys are forgotten
    rank = plan.group(int(plan.steps.group[computes.step[int(np.searchsorted(computes.ptr, update, side="right")) - 1]]))[0]

    result = run_plan(replace(plan, computes=replace(computes, mode=mode)), timeout_s=60)

    assert {m.rank for m in result.mismatches} == {rank}
    assert result.mismatches[0].tensor in ("o", "lse")
    assert result.verified.mismatches > 0


def test_a_call_too_large_to_compare_runs_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(attention_contents, "MAX_REFERENCE_FLOPS", 1.0)

    result = run_plan(planned(), timeout_s=60)

    assert result.verified.bytes == result.verified.mismatches == 0
    assert result.verified.against.startswith("not compared: one device takes")
    with pytest.raises(InputError, match="plan --pass recompute"):
        run_plan(planned(what=Pass.BACKWARD), timeout_s=60)


def test_what_numpy_does_not_compute_in_is_refused() -> None:
    with pytest.raises(InputError, match=r"q is bf16, .* in f32 or f64; run it with --arithmetic torch, or plan"):
        run_plan(planned(dtype="bf16"))


@pytest.mark.parametrize(
    ("transport", "plan"),
    [
        ("gloo", planned("all-gather", options=Options(head_stride=2))),
        ("gloo", planned(lengths=(5, 17, 1, 40), packed=True, layout=SequenceLayout.STRIPED, dtype="f32")),
        ("mpi", planned("all-gather", n_ranks=3, lengths=(96,))),
    ],
    ids=["gloo, all-gather", "gloo, packed", "mpi, all-gather"],
)
def test_ranks_with_memory_of_their_own_compute_the_same(transport: str, plan: Plan) -> None:
    try:
        load_library(transport)
    except InputError as error:
        pytest.skip(str(error))

    result = run_plan(plan, transport=transport, timeout_s=60, repeats=2)

    targets = zip(plan.problem.tensors, plan.problem.target.fragments, strict=True)
    assert result.verified.bytes == sum(int(f.n_elements.sum()) * t.itemsize for t, f in targets)
    assert result.mismatches == ()
    assert "attention on one device in float64: largest difference" in result.verified.against
    assert len(result.timeline.start_s) == len(plan.steps)
    assert (result.timeline.end_s >= result.timeline.start_s).all()
    assert result.timeline.digest == plan.digest


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_torch_computes_the_same_and_in_narrow_dtypes_too(dtype: str) -> None:
    pytest.importorskip("torch")

    result = run_plan(planned(dtype=dtype, layout=SequenceLayout.STRIPED), timeout_s=60, arithmetic=Arithmetic.TORCH)

    assert result.mismatches == ()
    assert result.verified.bytes > 0
    assert "attention by torch" in result.timeline.source


def test_what_computes_must_fit_the_plan_and_the_transport() -> None:
    torch = pytest.importorskip("torch")

    found = why_no_attention()

    assert (found is None) == (torch.version.cuda is not None)
    with pytest.raises(InputError, match="computes no attention, which torch could be chosen for"):
        run_plan(rows_to_columns(), arithmetic=Arithmetic.TORCH)


def test_inputs_follow_from_tensor_and_index() -> None:
    index = np.arange(10_000)

    given = values("q", index)

    assert (values("q", index[::-1]) == given[::-1]).all()
    assert (values("k", index) != given).mean() > 0.99
    assert abs(given.mean()) < 0.05
    assert -2 <= given.min() < -1.9 < 1.9 < given.max() < 2


def test_a_difference_knows_infinities_and_not_a_number() -> None:
    found = np.array([1.0, -np.inf, np.nan, -np.inf, 2.0])
    expected = np.array([1.5, -np.inf, 0.0, 3.0, 2.0])

    assert difference(found, expected).tolist() == [0.5, 0.0, np.inf, np.inf, 0.0]


def test_a_computing_rank_copies_beside_it() -> None:
    """Rank 0 drives a copy from 1 to 5 s and computes from 0 to 2 and from 4 to 6 s: 2 of 4 s side by side."""
    plan = planned(what=Pass.FORWARD, n_ranks=2, lengths=(8,))
    start_s, end_s = np.zeros(len(plan.steps)), np.zeros(len(plan.steps))
    copy = int(np.flatnonzero((plan.steps.op == Op.COPY) & (plan.steps.src == 0) & (plan.step_bytes > 0))[0])
    computes = [s for s in plan.computes.step.tolist() if plan.group(int(plan.steps.group[s]))[0] == 0]
    start_s[copy], end_s[copy] = 1, 5
    start_s[computes[1]], end_s[computes[0]], end_s[computes[1]] = 4, 2, 6

    found = overlap_of(plan, Timeline("measured", plan.digest, "by hand", start_s, end_s))

    assert (found.computing_s, found.copying_s, found.both_s) == (4, 4, 2)
    assert str(found) == "2e+03 of 4e+03 ms (50%), over all ranks"
    assert len(computes) == (plan.computes.kind == Kind.ATTEND).sum() / 2 == 2
