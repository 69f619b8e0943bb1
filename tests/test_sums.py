"""Plans of partial tensors: what is planned, refused, predicted, and given to libraries that add up."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hand_plans import row_shards
from typer.testing import CliRunner

from shardroute.executors.commands import app
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.messages.library_sums import Shape, find_summations
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.run import run_plan
from shardroute.executors.transports.nccl import NcclSums
from shardroute.executors.transports.nvshmem import NvshmemPuts
from shardroute.executors.transports.summing import Summing
from shardroute.executors.transports.torch_nccl import TorchPairs
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.backends.collectives import Collective, Group, collective_s
from shardroute.planner.check import check
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import TARGET, Backend, Op, Plan
from shardroute.planner.problems import Problem, one_tensor
from shardroute.planner.routing.auto import choose
from shardroute.planner.routing.caches import plan_key
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InfeasibleError, InputError, PlanError

MIB = 2**20


def problem(target: str = "R", *, axes: str = "dp=4", source: str = "P", shape: str = "64,96", dtype: str = "f32") -> Problem:
    return tensor_problem(shape, dtype, axes, source, axes, target)


def planned(way: str = "one-shot", machine: str = "cpu-processes", message_bytes: int | None = None, **of: str) -> Plan:
    given = problem(**of)
    return make_plan(given, build_topology(load_machine(machine), min_gpus=given.n_ranks), way, message_bytes)


def ops(plan: Plan) -> list[Op]:
    return [Op(op) for op in plan.steps.op.tolist()]


def test_a_partial_axis_that_becomes_replicated_is_one_all_reduce_or_two_steps() -> None:
    once, twice = planned("one-shot"), planned("two-shot")

    assert (ops(once), ops(twice)) == ([Op.ALL_REDUCE], [Op.REDUCE_SCATTER, Op.ALL_GATHER])
    assert twice.steps.after.tolist() == [0]
    assert twice.step_pieces.tolist() == [4, 4]


@pytest.mark.parametrize("way", ["one-shot", "two-shot"])
def test_a_partial_axis_that_becomes_sharded_is_one_reduce_scatter(way: str) -> None:
    plan = planned(way, target="S0")

    assert ops(plan) == [Op.REDUCE_SCATTER]


def test_sums_are_made_among_the_ranks_of_the_partial_axis_alone() -> None:
    plan = planned(axes="dp=2,tp=3", source="P,S1", target="R,S1")

    assert sorted(plan.group(int(g)).tolist() for g in plan.steps.group) == [[0, 3], [1, 4], [2, 5]]


def test_nccl_carries_a_sum_unless_it_may_not() -> None:
    given = problem()
    topology = build_topology(load_machine("dgx-h100"), min_gpus=4)

    found = [
        make_plan(given, topology, "one-shot", options=Options(backends=backends)).steps.backend.tolist()
        for backends in ((Backend.NCCL_PUT, Backend.NVSHMEM), (Backend.NVSHMEM, Backend.NCCL))
    ]

    assert found == [[Backend.NCCL_PUT], [Backend.NCCL]]


def test_steps_carry_no_more_than_the_message_size() -> None:
    plan = planned(message_bytes=5000)

    assert plan.step_bytes.max() <= 5000
    assert plan.step_bytes.sum() == 64 * 96 * 4


def test_a_plan_file_keeps_that_its_source_holds_addends(tmp_path: Path) -> None:
    plan = planned("two-shot")

    save_plan(plan, tmp_path / "sum.plan")

    read = load_plan(tmp_path / "sum.plan")
    assert read.problem.summed
    assert read.digest == plan.digest


def test_plans_of_copies_and_of_sums_have_different_keys() -> None:
    sums = problem()
    copies = replace(sums, summed=False)
    topology = build_topology(load_machine("cpu-processes"), min_gpus=4)

    assert plan_key(sums, topology, "auto", Options()) != plan_key(copies, topology, "auto", Options())


def without_a_rank(plan: Plan) -> Plan:
    return replace(plan, group_ranks=plan.group_ranks[:-1], group_ptr=np.array([0, 3]))


def with_a_rank_twice(plan: Plan) -> Plan:
    return replace(plan, group_ranks=np.array([0, 1, 2, 2], np.int32))


def twice(plan: Plan) -> Plan:
    steps = plan.steps
    columns = {name: np.repeat(c, 2) for name, c in steps.columns() if name not in ("after", "after_ptr")}
    return replace(plan, steps=replace(steps, **columns, after_ptr=np.zeros(3, np.int64), after=np.zeros(0, np.int32)))


def unordered(plan: Plan) -> Plan:
    return replace(plan, steps=replace(plan.steps, after=np.zeros(0, np.int32), after_ptr=np.zeros(3, np.int64)))


def of_copies(plan: Plan) -> Plan:
    return replace(plan, problem=replace(plan.problem, summed=False))


@pytest.mark.parametrize(
    ("way", "spoil", "words"),
    [
        ("one-shot", without_a_rank, "its group is not the ranks that hold addends"),
        ("one-shot", with_a_rank_twice, "group 0 names a rank twice"),
        ("one-shot", twice, "steps 0 and 1 both deliver"),
        ("two-shot", unordered, "step 1 gathers sums, but waits for no REDUCE_SCATTER"),
        ("one-shot", of_copies, "adds up .* only what its problem calls addends"),
    ],
)
def test_a_plan_that_adds_up_wrongly_is_refused(way: str, spoil: Callable[[Plan], Plan], words: str) -> None:
    plan = planned(way)

    with pytest.raises(PlanError, match=words):
        check(spoil(plan))


def test_a_reduce_scatter_of_what_all_need_delivers_too_little_by_itself() -> None:
    plan = planned("two-shot")
    first = {name: c[:1] for name, c in plan.steps.columns() if name not in ("after", "after_ptr")}

    with pytest.raises(PlanError, match="nothing delivers"):
        check(replace(plan, steps=replace(plan.steps, **first, after=np.zeros(0, np.int32), after_ptr=np.zeros(2, np.int64))))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"axes": "dp=2,tp=2", "source": "P,R", "target": "R,R"}, InputError, "R beside P on axis dp"),
        ({"source": "P(max)"}, InputError, "sums are planned"),
        ({"dtype": "u8"}, InputError, "u8 isn't added up"),
        ({"axes": "dp=2,tp=2", "source": "P,S0", "target": "R,R"}, InfeasibleError, "give the destination the source's ranks"),
    ],
)
def test_what_has_no_plain_meaning_as_a_sum_is_refused(
    arguments: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned(**arguments)


def test_strategies_of_copies_and_of_sums_are_not_taken_for_each_other() -> None:
    shape = (8, 8)
    copies = one_tensor(shape, "f32", row_shards(shape, [0]), row_shards(shape, [1]))
    topology = build_topology(load_machine("cpu-processes"), min_gpus=4)

    with pytest.raises(InputError, match="moves bytes, and the source is partial"):
        make_plan(problem(), topology, "direct")
    with pytest.raises(InputError, match="nothing of the source is partial"):
        make_plan(copies, topology, "one-shot")


def test_an_all_reduce_takes_what_the_model_of_collectives_says() -> None:
    plan = planned(machine="dgx-h100", axes="dp=8", shape="4096,4096")
    calibration = default_calibration("dgx-h100")

    found = predict(plan, calibration)

    alone_s, _ = collective_s(Collective.ALL_REDUCE, 64 * MIB, Group(8), plan.topology.machine, calibration)
    assert found.predicted_s == pytest.approx(alone_s + calibration.piece_s, rel=1e-6)


def test_auto_takes_the_way_that_is_predicted_faster() -> None:
    given = problem(axes="dp=8", shape="4096,4096")
    topology = build_topology(load_machine("dgx-h100"), 1)

    choice = choose(given, topology, default_calibration("dgx-h100"))

    assert [name for name, _ in choice.predicted_s] == ["one-shot", "two-shot"]
    assert choice.prediction.predicted_s == min(seconds for _, seconds in choice.predicted_s)


def test_libraries_get_one_call_for_each_run_of_bytes() -> None:
    shapes = {}
    for name, plan in {
        "all": planned(),
        "scatter": planned("two-shot"),
        "even shards": planned(target="S0"),
        "uneven shards": planned(target="S0", shape="66,96"),
    }.items():
        shapes[name] = [(each.shape, each.n_bytes) for each in find_summations(compile_plan(plan)[0])]

    assert shapes["all"] == [(Shape.ALL, 64 * 96 * 4)]
    assert shapes["scatter"] == shapes["even shards"] == [(Shape.SCATTER, 16 * 96 * 4)]
    assert shapes["uneven shards"] == [(Shape.ROOT, rows * 96 * 4) for rows in (17, 17, 17, 15)]


def test_libraries_refuse_boxes_whose_rows_lie_apart_and_say_what_else_there_is() -> None:
    programs, _ = compile_plan(planned(target="S1"))

    with pytest.raises(InputError, match=r"rows lie apart.*processes, gloo or mpi"):
        find_summations(programs)


@pytest.mark.parametrize(
    ("library", "ranks", "target", "shape", "words"),
    [
        (NvshmemPuts, "0,1,3", "R", "64,96", "ranks that are evenly apart"),
        (NvshmemPuts, "0-3", "S0", "66,96", "theirs differ|equal parts"),
        (TorchPairs, "0-3", "S0", "66,96", "equal parts"),
        (NcclSums, "0,1,3", "S0", "66,96", None),
    ],
)
def test_a_library_says_which_sums_it_cannot_make(
    library: type[Summing], ranks: str, target: str, shape: str, words: str | None
) -> None:
    given = tensor_problem(shape, "f32", f"dp={3 if ',' in ranks else 4}", "P", f"dp={3 if ',' in ranks else 4}", target,
    from_ranks=ranks, to_ranks=ranks)
    plan = make_plan(given, build_topology(load_machine("cpu-processes"), min_gpus=given.n_ranks), "one-shot")

    reason = library.why_not(cast(Summing, None), find_summations(compile_plan(plan)[0]))

    assert reason is None if words is None else re.search(words, str(reason))


def test_no_message_brings_what_a_library_adds_up() -> None:
    plan = planned("two-shot")
    programs, buffers = compile_plan(plan)

    ours, theirs = (lay_messages(plan, programs, buffers, library_sums=by) for by in (False, True))

    assert set(ours.step.tolist()) == {0, 1}
    assert set(theirs.step.tolist()) == {1}  # the all-gather
    assert theirs.window_bytes.sum() == 0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_run_finds_an_addend_that_is_missing(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(dtype=dtype)
    whole = run_plan(plan, timeout_s=60)
    programs, _ = compile_plan(plan)
    blocks = replace(programs.blocks, to=np.where(np.arange(len(programs.blocks.to)) == 5, 3, programs.blocks.to))
    spoiled_programs = replace(programs, blocks=blocks)
    monkeypatch.setattr("shardroute.executors.run.compile_plan", lambda plan: (spoiled_programs, compile_plan(plan)[1]))

    spoiled = run_plan(plan, timeout_s=60)

    assert whole.mismatches == ()
    assert sorted(found.rank for found in spoiled.mismatches) == [1, 3]


def test_the_command_line_plans_checks_and_runs_a_sum(tmp_path: Path) -> None:
    runner, path = CliRunner(), str(tmp_path / "sum.plan")
    tensor = ["--shape", "64,96", "--from-mesh", "dp=4", "--from-placements", "P", "--to-mesh", "dp=4", "--to-placements", "R"]

    done = [
        runner.invoke(app, ["plan", *tensor, "--machine", "cpu-processes", "--strategy", "two-shot", "-o", path]),
        runner.invoke(app, ["check", path]),
        runner.invoke(app, ["show", path]),
        runner.invoke(app, ["run", path]),
    ]

    assert [each.exit_code for each in done] == [0, 0, 0, 0], [each.output for each in done]
    assert "all right" in done[-1].output
    assert load_plan(path).steps.dst_at.tolist() == [TARGET, TARGET]
