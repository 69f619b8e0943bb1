"""Refit as systems run it: who sends to whom in M2N, what NeMo RL broadcasts, and that such plans run.

Figures of M2N come from its planner as published (nccl-extensions 0.1.0), run on the same layouts.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.run import run_plan
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.check import check
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.plans import SOURCE, TARGET, Backend, Lane, Op, Plan, lane_of
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing import gather_broadcast, m2n_pack
from shardroute.planner.routing.gather_broadcast import buffer_bytes_for
from shardroute.planner.routing.hybrid import in_bulk
from shardroute.planner.routing.m2n_rules import Chain, Comm, chains, is_split, leaders
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.simulator.refit import predict
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError

H100, NVL72 = load_machine("dgx-h100"), load_machine("gb200-nvl72")
MB = 10**6


def model_problem(name: str, source: str, target: str, scale: int = 1) -> Problem:
    return refit_problem(load_model(name, scale), parse_spec(source), parse_spec(target))[0]


def planned(problem: Problem, strategy: str, machine=H100) -> Plan:
    return make_plan(problem, build_topology(machine, min_gpus=problem.n_ranks), strategy)


def nic_bytes(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank sends to and receives from other domains."""
    steps, domain = plan.steps, plan.topology.domain
    far = np.flatnonzero((steps.op == Op.COPY) & (domain[steps.src] != domain[steps.dst]))
    n = plan.problem.n_ranks
    sent = np.bincount(steps.src[far], weights=plan.step_bytes[far], minlength=n)
    return sent, np.bincount(steps.dst[far], weights=plan.step_bytes[far], minlength=n)


@pytest.mark.parametrize(
    ("source", "target", "shape", "most_sent", "idle", "most_received"),
    [
        (("ep=16", "S0"), ("dp=8,tp=32", "R,S1"), "256,2048,7168", 469.8, 0, 234.9),
        (("dp=8", "R"), ("dp=4,tp=4", "R,S0"), "8192,8192", 134.2, 6, 33.6),
        (("dp=2,tp=8", "R,S0"), ("dp=2,tp=16", "R,S0"), "128,1536,4096", 201.3, 0, 100.7),
    ],
)  # fmt: skip
def test_nics_carry_what_the_published_planner_gives_them(source, target, shape, most_sent, idle, most_received) -> None:
    problem = tensor_problem(shape, "bf16", *source, *target)
    plan = planned(problem, "m2n-pack")

    sent, received = nic_bytes(plan)

    sources = problem.source.ranks
    assert sent[sources].max() / MB == pytest.approx(most_sent, abs=0.05)
    assert received.max() / MB == pytest.approx(most_received, abs=0.05)
    assert int((sent[sources] == 0).sum()) == idle


def test_copies_go_round_the_domains_one_after_the_other() -> None:
    """EP16 -> DP8 x TP32 in domains of 8: a replica is 4 domains, so a shard's 8 replicas are a chain of 8."""
    plan = planned(tensor_problem("256,2048,7168", "bf16", "ep=16", "S0", "dp=8,tp=32", "R,S1"), "m2n-pack")
    steps = plan.steps

    depth = np.zeros(len(steps), dtype=int)
    moves = (steps.op == Op.COPY) & (steps.src != steps.dst)
    for i in range(len(steps)):
        before = steps.after[steps.after_ptr[i] : steps.after_ptr[i + 1]]
        depth[i] = depth[before].max(initial=0) + int(moves[i])

    assert depth.max() == 8


def comm(n_ranks: int, n_domains: int, *, whole: bool = False) -> Comm:
    return Comm(n_ranks, n_domains, apart=True, whole=whole)


def test_with_few_ranks_every_source_replica_that_has_a_domain_to_serve_sends() -> None:
    topology = build_topology(H100, min_gpus=48)
    needers = range(16, 48, 4)  # two replicas in each of four domains

    found = chains(2, needers, topology, comm(48, 4))

    assert found == [Chain(0, ((16, 20), (32, 36))), Chain(1, ((24, 28), (40, 44)))]


def test_with_many_ranks_four_source_replicas_send_at_most_and_one_where_a_destination_replica_is_wider_than_a_domain() -> None:
    topology = build_topology(H100, min_gpus=256)
    needers = range(0, 256, 16)

    assert [c.replica for c in chains(8, needers, topology, comm(256, 16))] == [0, 1, 2, 3]
    assert [c.replica for c in chains(8, needers, topology, comm(256, 32))] == [0]
    assert [c.replica for c in chains(8, needers, topology, comm(200, 32))] == [*range(8)]


def test_domains_that_do_not_divide_by_replicas_are_dealt_in_a_row_and_more_replicas_than_domains_idle() -> None:
    topology = build_topology(H100, min_gpus=40)
    needers = (0, 8, 16, 24, 32)
    uneven = comm(64, 8)

    assert not is_split(uneven, len(needers))
    assert [c.nodes for c in chains(2, needers, topology, uneven)] == [((0,), (8,), (16,)), ((24,), (32,))]
    assert [c.replica for c in chains(9, needers, topology, uneven)] == [0, 1, 2, 3, 4]


def test_a_small_broadcast_goes_by_replicas_and_looks_at_no_domains() -> None:
    topology = build_topology(H100, min_gpus=16)

    few = chains(2, range(8, 13), topology, comm(16, 1, whole=True))
    many = chains(8, range(8, 12), topology, comm(16, 1, whole=True))

    assert few == [Chain(0, ((8, 9, 10),)), Chain(1, ((11, 12),))]
    assert [(c.replica, c.nodes) for c in many] == [(0, ((8,),)), (2, ((9,),)), (4, ((10,),)), (6, ((11,),))]


def test_source_shards_are_dealt_over_the_first_domain_and_pile_up_where_a_later_one_has_fewer_ranks() -> None:
    chain = Chain(0, ((8, 9, 10), (16, 17)))

    assert leaders(chain, 7) == [(range(0, 3), (8, 16)), (range(3, 5), (9, 17)), (range(5, 7), (10, 17))]
    assert leaders(chain, 2) == [(range(0, 1), (8, 16)), (range(1, 2), (9, 17))]


def test_the_calls_of_a_stream_do_not_overlap_and_two_streams_do() -> None:
    problem = model_problem("qwen3-30b-a3b", "PP2 x EP8", "TP8")
    plan = planned(problem, "m2n-pack")
    found = predict(plan, default_calibration("dgx-h100")).timeline

    steps = plan.steps
    spans = []
    for stream in (0, 1):
        barriers = np.flatnonzero((steps.op == Op.BARRIER) & (steps.lane >> 3 == 16 * stream))
        assert (np.diff(found.start_s[barriers]) >= 0).all()
        assert len({plan.group(int(g)).tobytes() for g in steps.group[barriers]}) == 1  # a stage's ranks, and all receivers
        spans.append((found.start_s[barriers[0]], found.end_s[barriers[-1]]))
    assert spans[0][0] < spans[1][1]
    assert spans[1][0] < spans[0][1]


@pytest.mark.parametrize("strategy", ["m2n-pack", "hybrid", "gather-broadcast"])
@pytest.mark.parametrize(
    ("source", "target"), [("PP2 x EP4", "TP2 x DP3"), ("TP2 x EP2 x PP2", "TP4 x DP2")], ids=["experts", "both"]
)
def test_processes_run_what_systems_run(strategy: str, source: str, target: str) -> None:
    problem = model_problem("qwen3-30b-a3b", source, target, scale=1024)
    plan = planned(problem, strategy, load_machine("cpu-processes"))

    found = run_plan(plan, timeout_s=60)

    assert found.verified.mismatches == 0
    assert found.verified.bytes > 0
    check(plan)


@pytest.mark.parametrize("machine", [H100, NVL72], ids=["DGX", "NVL72"])
@pytest.mark.parametrize("strategy", ["m2n-pack", "hybrid"])
def test_many_tensors_of_many_classes_go_through_the_same_slots(machine, strategy: str) -> None:
    problem = model_problem("deepseek-v3", "PP2[30,31] x EP8 x TP2", "TP8 x DP2", scale=64)
    plan = planned(problem, strategy, machine)

    assert len(problem.classes) > 10
    assert check(plan).n_bytes > 0


def test_only_feed_forward_weights_are_bulk() -> None:
    layer = "model.layers.0"
    bulk = [
        f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.down_proj.weight",
        f"{layer}.mlp.experts.*.gate_proj.weight", f"{layer}.mlp.experts.gate_up_proj",
        f"{layer}.block_sparse_moe.experts.*.w1.weight",
    ]  # fmt: skip
    rest = [
        f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.gate.weight", f"{layer}.mlp.shared_experts.gate_proj.weight",
        f"{layer}.mlp.shared_expert.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight",
        f"{layer}.input_layernorm.weight", f"{layer}.mlp.experts.*.gate_proj.weight_scale_inv", "tensor",
        "model.layers.61.eh_proj.weight", "model.layers.61.mlp.experts.*.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight",
    ]  # fmt: skip

    found = in_bulk(bulk + rest)

    assert found.tolist() == [*range(len(bulk))]


def test_the_rest_begins_when_the_bulk_has_been_unpacked() -> None:
    problem = model_problem("qwen3-30b-a3b", "PP2 x EP8", "TP8 x DP2", scale=4)
    plan = planned(problem, "hybrid")
    found = predict(plan, default_calibration("dgx-h100")).timeline

    bulk = set(in_bulk([t.name for t in problem.tensors]).tolist())
    first = plan.bundles.tensor[np.minimum(plan.bundles.ptr[plan.steps.bundle], len(plan.bundles.tensor) - 1)]
    carries = plan.step_pieces > 0
    of_bulk = carries & np.isin(first, list(bulk))

    assert of_bulk.any()
    assert (carries & ~of_bulk).any()
    assert found.end_s[of_bulk].max() <= found.start_s[carries & ~of_bulk].min()


@pytest.mark.parametrize(("machine", "n_bytes"), [("dgx-h100", 1.6e9), ("gb200-nvl72", 3.72e9)])
def test_a_buffer_is_two_percent_of_memory(machine: str, n_bytes: float) -> None:
    problem = tensor_problem("8,8", "bf16", "x=2", "S0", "x=2", "S1")

    assert buffer_bytes_for(problem, build_topology(load_machine(machine))) == int(n_bytes)


def test_no_buffer_is_exceeded_and_two_are_in_flight() -> None:
    problem = model_problem("qwen3-30b-a3b", "EP8", "TP8")
    plan = planned(problem, "gather-broadcast")
    found = predict(plan, default_calibration("dgx-h100")).timeline

    steps = plan.steps
    gathers, sends = (np.flatnonzero(steps.op == op) for op in (Op.ALL_GATHER, Op.BROADCAST))
    assert len(gathers) == len(sends) > 10
    assert plan.step_bytes[gathers].max() <= 1.6e9
    assert plan.peak_staging_bytes <= 2 * 1.6e9
    # The next is gathered while one is broadcast, but not the one after the next.
    assert (found.start_s[gathers[1:]] < found.end_s[sends[:-1]]).all()
    assert (found.start_s[gathers[2:]] >= found.end_s[sends[:-2]]).all()


def broadcast_ranks(plan: Plan) -> set[int]:
    [group] = set(plan.steps.group[plan.steps.op == Op.BROADCAST].tolist())
    return set(plan.group(group).tolist())


def test_training_ranks_join_a_broadcast_that_leaves_their_domain_so_that_all_nics_carry_it() -> None:
    far, near = (tensor_problem("64,64", "bf16", "x=8", "S0", f"x={n}", "S1") for n in (8, 2))
    small = tensor_problem("64,64", "bf16", "x=4", "S0", "x=4", "S1")

    joined, inside = planned(far, "gather-broadcast"), planned(small, "gather-broadcast")
    alone = gather_broadcast.plan(far, pieces_of(far), joined.topology, Backend.NCCL, root_alone=True)

    assert broadcast_ranks(joined) == set(range(16))
    assert broadcast_ranks(planned(near, "gather-broadcast")) == set(range(10))
    assert broadcast_ranks(inside) == {0, *range(4, 8)}
    assert broadcast_ranks(alone) == {0, *range(8, 16)}
    big = tensor_problem("4096,65536", "bf16", "x=8", "S0", "x=8", "S1")
    whole = planned(big, "gather-broadcast")
    one = gather_broadcast.plan(big, pieces_of(big), whole.topology, Backend.NCCL, root_alone=True)
    costs = default_calibration("dgx-h100")
    assert predict(one, costs).predicted_s > 3 * predict(whole, costs).predicted_s


def test_ranks_that_train_and_infer_keep_a_buffer_until_they_have_copied_it_out() -> None:
    problem = tensor_problem("64,64", "bf16", "x=16", "S0", "x=16", "S1", from_ranks="0-15", to_ranks="0-15")
    plan = gather_broadcast.plan(problem, pieces_of(problem), build_topology(H100, 2), Backend.NCCL, 1024)

    proof = check(plan)
    found = run_plan(plan, timeout_s=60)

    assert (plan.steps.op == Op.BROADCAST).sum() > 4
    assert proof.n_bytes > 0
    assert found.verified.mismatches == 0


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(1, 300))
def test_every_receiver_is_in_one_chain_and_every_source_shard_enters_by_one_leader(n_ranks, n_holders, step, n_comm) -> None:
    topology = build_topology(H100, min_gpus=n_ranks * step)
    needers = range(0, n_ranks * step, step)
    n_domains = len(np.unique(topology.domain[list(needers)]))

    for whole in (False, True):
        found = chains(n_holders, needers, topology, comm(n_comm, n_domains, whole=whole))

        assert sorted(rank for chain in found for node in chain.nodes for rank in node) == list(needers)
        assert all(0 <= chain.replica < n_holders for chain in found)
        for chain in found:
            dealt = leaders(chain, 5)
            assert sorted(i for part, _ in dealt for i in part) == [0, 1, 2, 3, 4]
            assert all(lead in node for _, leads in dealt for lead, node in zip(leads, chain.nodes, strict=True))


def test_a_rank_that_holds_what_it_needs_copies_it_and_takes_no_part() -> None:
    problem = tensor_problem("8,8", "f32", "x=4", "S0", "x=4", "S0", from_ranks="0-3", to_ranks="0-3")
    plan = planned(problem, "m2n-pack")

    assert (plan.steps.op == Op.COPY).all()
    assert (plan.steps.src_at == SOURCE).all()
    assert (plan.steps.dst_at == TARGET).all()
    assert (lane_of(plan.steps.lane) == Lane.LOCAL).all()


def test_more_steps_than_can_be_planned_are_refused_in_words(monkeypatch) -> None:
    monkeypatch.setattr(m2n_pack, "MOST_STEPS", 100)

    with pytest.raises(InputError, match="m2n-pack would take 4,387 steps"):
        planned(tensor_problem("256,2048,7168", "bf16", "ep=16", "S0", "dp=8,tp=32", "R,S1"), "m2n-pack")
