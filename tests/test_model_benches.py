"""NCCL M2N's model benchmark: its tensors, patterns and teams, who sends to whom through windows, and that such plans run."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from shardroute.executors.run import run_plan
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.check import check
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.plans import Op, Plan
from shardroute.planner.routing import m2n_window
from shardroute.planner.routing.m2n_window import Way
from shardroute.planner.routing.strategies import backend_for, pieces_of
from shardroute.planner.validation import model_benches
from shardroute.planner.validation.model_benches import Bench, Split, bench, lsa_ranks, pattern_times
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError

NVL72 = load_machine("gb200-nvl72")
MB = 10**6
DSV3 = ("PP4 x EP16 x DP32", "TP8 x DP16")
QWEN = ("PP4 x EP16 x TP2 x CP2 x DP4", "TP8 x DP8")
# Stages of the two runs as tensors, and the LSA teams of their communicators.
RUNS = [
    ("256,2048,7168", ("dp=2,ep=16", "R,S0"), ("dp=16,tp=8", "R,S1"), 32),
    ("1536,7168", ("dp=32", "R"), ("dp=16,tp=8", "R,S0"), 32),
    ("128,1536,4096", ("dp=1,ep=16", "R,S0"), ("dp=8,tp=8", "R,S1"), 16),
    ("8192,4096", ("dp=8,tp=2", "R,S0"), ("dp=8,tp=8", "R,S0"), 16),
]


@cache
def run_of(model: str, precision: str | None = None, mtp: bool = False) -> Bench:
    source, target = DSV3 if model == "deepseek-v3" else QWEN
    return bench(load_model(model, precision=precision, mtp=mtp), parse_spec(source), parse_spec(target))


def planned(shape, source, target, team: int, way: Way, dtype: str = "bf16") -> Plan:
    problem = tensor_problem(shape, dtype, *source, *target)
    topology = build_topology(replace(NVL72, hosts_per_domain=team // 4, figures=()), None, problem.n_ranks)
    return m2n_window.plan(problem, pieces_of(problem), topology, backend_for(problem, topology), way)


def nic_megabytes(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """What each rank sends to and receives from other domains."""
    steps, domain = plan.steps, plan.topology.domain
    far = np.flatnonzero((steps.op == Op.COPY) & (domain[steps.src] != domain[steps.dst]))
    n, size = plan.problem.n_ranks, plan.step_bytes[far] / MB
    return np.bincount(steps.src[far], size, n), np.bincount(steps.dst[far], size, n)


def test_a_run_has_the_tensors_of_the_checkpoint_by_pattern_in_order_of_names() -> None:
    run = run_of("qwen3-235b-a22b")

    assert (run.n_stages, run.stage_ranks, run.target_ranks) == (4, 16, 64)
    assert len(run.tensors) == 94 * 12 + 3
    assert list(run.patterns) == sorted(run.patterns)
    assert len(run.patterns["model.layers.X.mlp.experts.*.down_proj.weight"]) == 94


def test_experts_are_split_over_ep_and_other_weights_over_tp_and_generation_splits_all_by_tp() -> None:
    splits = {name: (some[0].source, some[0].target) for name, some in run_of("qwen3-235b-a22b").patterns.items()}

    assert splits["model.layers.X.mlp.experts.*.gate_proj.weight"] == (Split(0, 16), Split(1, 8))
    assert splits["model.layers.X.mlp.experts.*.down_proj.weight"] == (Split(0, 16), Split(2, 8))
    assert splits["model.layers.X.self_attn.o_proj.weight"] == (Split(1, 2), Split(1, 8))
    assert splits["model.embed_tokens.weight"] == (Split(0, 2), Split(0, 8))
    assert splits["model.layers.X.mlp.gate.weight"] == splits["model.norm.weight"] == (None, None)


def test_layers_go_to_stages_by_their_number_with_the_checkpoints_last_layer_among_them() -> None:
    run = run_of("deepseek-v3", "fp8-block", mtp=True)
    experts = run.patterns["model.layers.X.mlp.experts.*.up_proj.weight"]

    assert [sum(one.stage == stage for one in experts) for stage in range(4)] == [13, 15, 16, 15]
    assert {"model.layers.X.shared_head.head.weight", "model.layers.X.embed_tokens.weight"} <= set(run.patterns)
    assert experts[0].tensor.dtype == "f8_e4m3"


def test_a_tensor_that_the_splits_do_not_divide_is_left_out() -> None:
    model = load_model("qwen3-30b-a3b")

    odd = bench(model, parse_spec("PP2 x EP8 x DP8"), parse_spec("TP3 x DP2"))

    assert not any(one.pattern.endswith("k_proj.weight") for one in odd.tensors)
    assert any(one.pattern.endswith("q_norm.weight") for one in odd.tensors)


def test_deepseek_v3_would_not_fit_in_bf16_with_a_buffer_for_each_tensor() -> None:
    largest = max(one.buffer_bytes for one in run_of("deepseek-v3").tensors if "experts" in one.tensor.name)
    memory_bytes = 186 * 2**30  # 186 GB by MLPerf, were GiB meant

    assert run_of("deepseek-v3").target_buffer_bytes + 4 * largest > memory_bytes
    assert run_of("deepseek-v3", "fp8-block", mtp=True).target_buffer_bytes < 0.6 * memory_bytes


@pytest.mark.parametrize(("stage", "domain", "team"), [(32, 64, 32), (16, 64, 16), (48, 64, 16), (64, 64, 64), (32, 8, 8)])
def test_a_team_is_the_largest_equal_run_of_a_communicators_ranks_within_domains(stage: int, domain: int, team: int) -> None:
    """By trying them: every run of a stage and of generation is cut into teams without a rest."""
    fits = [n for n in range(1, 73) if stage % n == 0 and domain % n == 0]

    assert lsa_ranks(stage, domain) == max(fits) == team


def test_teams_that_are_parts_of_hosts_are_refused() -> None:
    run = bench(load_model("qwen3-30b-a3b"), parse_spec("PP2 x EP2 x DP2"), parse_spec("TP2 x DP2"))

    with pytest.raises(InputError, match="teams of 2 GPUs are no whole hosts of 4"):
        pattern_times(run, NVL72, 64, default_calibration("gb200-nvl72"), Way.RING)


@pytest.mark.parametrize(("shape", "source", "target", "team", "sent", "received", "n_hops"), [
    (*RUNS[0], 469.8, 234.9, 704), (*RUNS[1], 22.0, 2.8, 128), (*RUNS[2], 100.7, 100.7, 240), (*RUNS[3], 33.6, 8.4, 64),
])  # fmt: skip
def test_a_ring_goes_the_ways_of_the_published_planner(shape, source, target, team, sent, received, n_hops) -> None:
    """What M2N 0.1.0's library gives for node-aware rings without split communicators; all hops were compared, their number is
    held here.
    """
    plan = planned(shape, source, target, team, Way.RING)
    out, into = nic_megabytes(plan)
    copies = plan.steps.op == Op.COPY

    check(plan)
    assert round(out.max(), 1) == sent
    assert round(into.max(), 1) == received
    assert len(set(zip(plan.steps.src[copies].tolist(), plan.steps.dst[copies].tolist(), strict=True))) == n_hops


@pytest.mark.parametrize(("shape", "source", "target", "team"), RUNS)
def test_direct_brings_every_byte_over_nics_to_each_rank_that_needs_it(shape, source, target, team) -> None:
    plan = planned(shape, source, target, team, Way.DIRECT)
    out, into = nic_megabytes(plan)
    needed = plan.problem.target.fragments[0]

    check(plan)
    assert into[needed.rank] == pytest.approx(needed.n_elements * 2 / MB)
    assert out.sum() == pytest.approx(into.sum())
    assert not (plan.topology.domain[plan.steps.src] == plan.topology.domain[plan.steps.dst])[plan.steps.op == Op.COPY].any()


def test_calls_of_a_stage_follow_each_other_between_barriers_and_stages_go_side_by_side() -> None:
    run = bench(load_model("qwen3-30b-a3b"), parse_spec("PP2 x EP4 x DP4"), parse_spec("TP4 x DP2"))
    problem = run.problem([one for one in run.tensors if one.pattern.endswith("input_layernorm.weight")][20:28])
    topology = build_topology(NVL72, None, problem.n_ranks)

    plan = m2n_window.plan(problem, pieces_of(problem), topology, backend_for(problem, topology), Way.RING)

    barriers = np.flatnonzero(plan.steps.op == Op.BARRIER)
    waits = [
        [d for d in plan.steps.after[slice(*plan.steps.after_ptr[b : b + 2])] if plan.steps.op[d] == Op.BARRIER] for b in barriers
    ]
    stages = {one.tensor.name: one.stage for one in run.tensors}
    assert len(barriers) == 2 * len(problem.tensors)
    assert sum(not before for before in waits[::2]) == len({stages[t.name] for t in problem.tensors}) == 2
    assert all(len(before) <= 1 for before in waits)


@pytest.mark.parametrize("way", list(Way))
def test_a_window_plan_moves_a_model_by_processes(way: Way) -> None:
    run = bench(load_model("qwen3-30b-a3b", 4096), parse_spec("PP2 x EP2 x DP2"), parse_spec("TP2 x DP2"))
    problem = run.problem([one for one in run.tensors if ".layers.0." in one.tensor.name or ".layers.47." in one.tensor.name])
    topology = build_topology(replace(NVL72, hosts_per_domain=1, figures=()), None, problem.n_ranks)
    plan = m2n_window.plan(problem, pieces_of(problem), topology, backend_for(problem, topology), way)

    found = run_plan(plan)

    assert not found.mismatches


@pytest.mark.parametrize(("way", "name"), [*product(Way, ["mlp.experts.*.up_proj.weight", "input_layernorm.weight"])])
def test_a_pattern_continued_along_turns_takes_as_long_as_all_of_it(way: Way, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(load_model("qwen3-30b-a3b"), parse_spec("PP2 x EP4 x DP4"), parse_spec("TP4 x DP4"))
    uneven = [one for one in run.tensors if one.pattern.endswith(name)][:-3]
    one = replace(run, tensors=tuple(uneven))
    costs = default_calibration("gb200-nvl72")

    [continued] = pattern_times(one, NVL72, 8, costs, way)
    monkeypatch.setattr(model_benches, "_TURNS", 100)
    [whole] = pattern_times(one, NVL72, 8, costs, way)

    assert continued.n_tensors == whole.n_tensors == 45
    assert continued.time_s == pytest.approx(whole.time_s, rel=0.03)
