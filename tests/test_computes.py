"""What attention steps are predicted to take, in closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from shardroute.planner.backends.channels import channel_law
from shardroute.planner.backends.computes import cpu_seconds, gpu_seconds, works_of
from shardroute.planner.backends.rates import load_rates
from shardroute.planner.critical_paths import critical_path, summarise
from shardroute.planner.plans import Backend, Kind, Op
from shardroute.planner.ring.strategies import Options, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.planner.simulator.refit import predict
from shardroute.topologies import build_topology, load_calibration, load_machine
from shardroute.topologies.costs import SumCost, TileCost
from shardroute.topologies.errors import InputError

CPU = build_topology(load_machine("cpu-processes"), min_gpus=8)
GPU = build_topology(load_machine("gb200-nvl72"), min_gpus=8)


def costs(**changes: object):
    """A calibration in which a score takes 1 us, and nothing else of computing and waiting anything."""
    zero = TileCost(1e-6, 0.0, 0.0, 0.0, 0.0)
    known = load_calibration("cpu-processes")
    free = dict.fromkeys(("start_s", "check_s", "wait_s", "compute_s"), 0.0)
    return replace(known, figures=(), attend_f32=zero, grad_f32=zero, sums=SumCost(1e9, 5e8), **free | changes)


def test_all_ranks_together_compute_each_pair_once() -> None:
    for strategy in ("ring", "all-gather", "pass-q", "ulysses"):
        plan = ring_plan(Attention((64,), 4, 8, 4, 16, dtype="f32"), CPU, strategy, Pass.RECOMPUTE)

        works = works_of(plan)

        for kind in (Kind.ATTEND, Kind.GRAD):
            pairs = sum(work.n_pairs for work, k in zip(works, plan.computes.kind.tolist(), strict=True) if k == kind)
            assert pairs == 8 * 64 * 65 / 2


def test_a_full_block_takes_its_scores_on_a_cpu_and_a_sum_its_bytes() -> None:
    call = Attention((64,), 2, 2, 1, 16, causal=False, dtype="f32", layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, CPU, "ring", Pass.BACKWARD)

    seconds = cpu_seconds(plan, costs())

    kinds = plan.computes.kind
    assert seconds[kinds == Kind.GRAD] == pytest.approx(np.full(4, 32 * 32 * 2 * 1e-6))
    assert seconds[kinds == Kind.ADD] == pytest.approx(np.full(2, 2 * 32 * 16 * 4 / 1e9))


def test_a_step_that_computes_takes_a_time_beside_its_arithmetic() -> None:
    plan = ring_plan(Attention((64,), 2, 1, 1, 16, dtype="f32"), CPU, "ring", Pass.RECOMPUTE)

    more_s = cpu_seconds(plan, replace(costs(), compute_s=0.5)) - cpu_seconds(plan, costs())

    assert more_s == pytest.approx(np.full(len(plan.computes), 0.5))


def test_every_part_of_a_tile_has_its_cost() -> None:
    call = Attention((8,), 1, 2, 2, 4, dtype="f32", layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, CPU, "ring")

    seconds = cpu_seconds(plan, replace(costs(), attend_f32=TileCost(1.0, 100.0, 1e4, 1e6, 1e9)))

    # Two heads, each one masked tile of 8 x 8.
    assert seconds.tolist() == [2 * (64 * (1 + 4 * 100 + 1e4) + 16 * 4 * 1e6 + 1e9)]


def test_an_output_that_is_added_to_is_merged_with_what_was_there() -> None:
    call = Attention((64,), 2, 2, 1, 16, causal=False, dtype="f32", layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, CPU, "ring")

    seconds = cpu_seconds(plan, costs())

    block, merged = 32 * 32 * 2 * 1e-6, 32 * 2 * 16 * 4 / 5e8
    assert sorted(seconds.tolist()) == pytest.approx([block, block, block + merged, block + merged])


def test_a_gpu_computes_at_attentions_rate_and_merges_through_its_memory() -> None:
    call = Attention((1024,), 4, 8, 8, 64)
    plan, rates, machine = ring_plan(call, GPU, "ring"), load_rates("gb200-nvl72"), GPU.machine

    seconds = gpu_seconds(plan, machine)

    per_rank = call.flops(backward=False) / 4 / rates.forward_Fps
    merging = 4 * (1024 / 4 * 8 * 64) * rates.forward_bytes / machine.hbm_Bps
    assert seconds.sum() / 4 == pytest.approx(per_rank + merging)


def test_one_rank_takes_launch_and_arithmetic_and_nothing_else() -> None:
    known = costs()
    call = Attention((64,), 1, 1, 1, 16, causal=False, dtype="f32", layout=SequenceLayout.CONTIGUOUS)

    predicted = predict(ring_plan(call, CPU, "ring"), known).predicted_s

    assert predicted == pytest.approx(known.launch_s + 64 * 64 * 1e-6)


def test_copies_hide_behind_arithmetic_that_is_long_enough() -> None:
    """Two ranks on many cores: the second block arrives while the first is computed with, so only attention is seen."""
    known = costs(cores=8.0, launch_s=0.0, piece_s=0.0, run_s=0.0)
    call = Attention((256,), 2, 1, 1, 16, causal=False, dtype="f32", layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, CPU, "ring")

    prediction = predict(plan, known)

    copies = np.flatnonzero((plan.steps.op == Op.COPY) & (plan.step_bytes > 0))
    first = float(prediction.timeline.end_s[plan.computes.step[:2]].min())
    assert prediction.predicted_s == pytest.approx(2 * 128 * 128 * 1e-6 + 128 * 16 * 4 / 5e8)
    assert (prediction.timeline.end_s[copies] < first).all()


def on_two_gpus(backend: Backend):
    """Two blocks of attention, of which the first hides the copy of the second's keys; prediction, and the step that copies."""
    call = Attention((65536,), 2, 8, 1, 128, causal=False, layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, GPU, "ring", options=Options(backend=backend))
    prediction = predict(plan, load_calibration("gb200-nvl72"))
    return plan, prediction, int(np.flatnonzero((plan.steps.op == Op.COPY) & (plan.step_bytes > 0))[0])


def test_a_hidden_copy_of_nccl_takes_its_sms_from_attention_and_a_put_does_not() -> None:
    law = channel_law(GPU.machine, load_calibration("gb200-nvl72"))
    assert law is not None

    plan, slowed, copy = on_two_gpus(Backend.NCCL)
    _, free, _ = on_two_gpus(Backend.NVSHMEM)

    share = int(law.channels(int(plan.step_bytes[copy]), 2)) / load_rates("gb200-nvl72").n_sms
    copied_s = float(law.send_recv_s(int(plan.step_bytes[copy]), 2))
    assert free.predicted_s == pytest.approx(gpu_seconds(plan, GPU.machine)[::2].sum())
    assert slowed.predicted_s == pytest.approx(free.predicted_s + share * copied_s)


def test_sms_are_links_of_the_picture_but_not_among_what_carries_bytes() -> None:
    plan, prediction, _ = on_two_gpus(Backend.NCCL)

    chain = critical_path(plan, prediction)

    assert {link.resource for link in chain if link.shared_s > 0} == {"SMs of GPU 0"}
    assert not any("SMs" in resource.name for resource in prediction.resources)
    assert sum(part.seconds for part in summarise(plan, chain)) == pytest.approx(prediction.predicted_s)


def test_a_reduce_scatter_adds_up_as_many_bytes_as_its_bundle_has() -> None:
    known = costs(cores=8.0, launch_s=0.0, piece_s=0.0, run_s=0.0)
    call = Attention((64,), 2, 1, 1, 16, dtype="f32")
    plan = ring_plan(call, CPU, "all-gather", Pass.BACKWARD, Options(head_stride=1))
    reduce = int(np.flatnonzero(plan.steps.op == Op.REDUCE_SCATTER)[0])

    timeline = predict(plan, known).timeline

    assert timeline.end_s[reduce] - timeline.start_s[reduce] == pytest.approx(2 * 64 * 16 * 4 / 1e9)


def test_costs_that_are_lacking_are_named() -> None:
    plan = ring_plan(Attention((64,), 2, 2, 2, 16, dtype="f32"), CPU, "ring", Pass.BACKWARD)

    with pytest.raises(InputError, match="has no costs grad_f32, which attention takes on CPUs"):
        predict(plan, replace(costs(), grad_f32=None))
    with pytest.raises(InputError, match="has no costs sums"):
        predict(plan, replace(costs(), sums=None))
    with pytest.raises(InputError, match="has no costs attend_f16"):
        predict(ring_plan(Attention((64,), 2, 2, 2, 16, dtype="f16"), CPU, "ring"), costs())
