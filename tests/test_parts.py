"""A rank's part of a plan says what the rank does in the whole, and is refused where the file contradicts itself."""

import zipfile
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from shardroute.executors.interpreting.interpret import compile_plan, load_programs
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.parts import load_part, part_of
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Op
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError, PlanError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")


def small_plan(strategy="greedy"):
    # One NIC in four is down, so that ranks stage pieces for others.
    problem = tensor_problem("64,48", "bf16", "dp=2,ep=4", "R,S0", "dp=3,tp=4", "R,S1")
    topology = build_topology(H100, None, problem.n_ranks)
    topology = replace(topology, own_nic_Bps=tuple((gpu, 0.0) for gpu in range(1, 20, 4)))
    return make_plan(problem, topology, strategy, options=Options(message_bytes=200))


def model_plan():
    problem = refit_problem(load_model("qwen3-30b-a3b", 16), parse_spec("TP2 x PP2 x EP4"), parse_spec("TP4 x DP2"))[0]
    return make_plan(problem, build_topology(H100, None, problem.n_ranks), "greedy")


@pytest.fixture(scope="module", params=["greedy", "domain-relay", "gather-broadcast", "m2n-pack", "hybrid", "model"])
def plan(request):
    return model_plan() if request.param == "model" else small_plan(request.param)


def takes_part(plan, step, rank):
    steps = plan.steps
    if steps.op[step] == Op.COPY:
        return rank in (steps.src[step], steps.dst[step])
    return rank == steps.src[step] or rank in plan.group(int(steps.group[step]))


def content(plan, step):
    """What a step carries, by name and box."""
    bundle = int(plan.steps.bundle[step])
    rows = range(int(plan.bundles.ptr[bundle]), int(plan.bundles.ptr[bundle + 1]))
    found = []
    for row in rows:
        tensor, piece = int(plan.bundles.tensor[row]), int(plan.bundles.piece[row])
        boxes = plan.boxes[int(plan.tensor_class[tensor])]
        name = plan.problem.tensors[tensor].name
        found.append((name, boxes.lo[piece].tolist(), boxes.hi[piece].tolist(), int(plan.bundles.offset[row])))
    return found


def test_a_part_has_the_steps_in_which_its_rank_takes_part(plan) -> None:
    for rank in range(plan.problem.n_ranks):
        part = part_of(plan, rank)

        wanted = [step for step in range(len(plan.steps)) if takes_part(plan, step, rank)]
        assert part.step.tolist() == wanted
        assert part.n_steps == len(plan.steps)
        for name, column in part.plan.steps.columns():
            if name not in ("bundle", "after", "after_ptr"):
                assert column.tolist() == getattr(plan.steps, name)[part.step].tolist()


def test_its_steps_carry_the_same_and_wait_for_the_same(plan) -> None:
    for rank in range(0, plan.problem.n_ranks, 3):
        part = part_of(plan, rank)
        ours, whole = part.plan.steps, plan.steps

        for i, step in enumerate(part.step.tolist()):
            assert content(part.plan, i) == content(plan, step)
            waits = set(whole.after[whole.after_ptr[step] : whole.after_ptr[step + 1]].tolist()) & set(part.step.tolist())
            driven = whole.op[step] != Op.COPY or whole.src[step] == rank
            found = part.step[ours.after[ours.after_ptr[i] : ours.after_ptr[i + 1]]]
            assert set(found.tolist()) == (waits if driven else set())


@pytest.mark.parametrize("strategy", ["greedy", "domain-relay"])
def test_a_rank_compiles_its_part_to_what_it_does_in_the_whole(strategy) -> None:
    plan = small_plan(strategy)
    whole, all_buffers = compile_plan(plan)
    for rank in range(plan.problem.n_ranks):
        part = part_of(plan, rank)

        ours, buffers = compile_plan(part.plan)

        assert buffers.arena_bytes[rank] == all_buffers.arena_bytes[rank]
        assert acts(ours, rank, part.step, buffers) == acts(whole, rank, np.arange(len(plan.steps)), all_buffers)


def acts(programs, rank, number, buffers):
    """The rank's actions: step, waits, and copies; an address in a slot of another rank counts from the slot's start."""
    found = []
    for action in range(int(programs.actions.ptr[rank]), int(programs.actions.ptr[rank + 1])):
        waits = programs.actions.wait[programs.actions.wait_ptr[action] : programs.actions.wait_ptr[action + 1]]
        copies = []
        for row in range(int(programs.actions.block_ptr[action]), int(programs.actions.block_ptr[action + 1])):
            blocks, forms = programs.blocks, programs.forms
            to, dst, form = int(blocks.to[row]), int(blocks.dst[row]), int(blocks.form[row])
            shape = None if form < 0 else [forms.run[form], *(c[form].tolist() for c in (forms.count, forms.src_stride))]
            copies.append((int(blocks.src[row]), to, buffers.describe(to, dst), int(blocks.n_bytes[row]), shape))
        found.append((int(number[programs.actions.step[action]]), sorted(number[waits].tolist()), copies))
    return found


def test_a_part_from_a_file_is_the_part_of_the_plan(tmp_path, plan) -> None:
    save_plan(plan, tmp_path / "a.plan")
    for rank in (0, plan.problem.n_ranks - 1):
        loaded, made = load_part(tmp_path / "a.plan", rank, plan.digest), part_of(plan, rank)

        assert loaded.digest == plan.digest
        assert loaded.plan.digest == made.plan.digest
        assert loaded.step.tolist() == made.step.tolist()


def test_a_part_is_small_and_a_transport_gets_its_programs(tmp_path) -> None:
    plan = model_plan()
    save_plan(plan, tmp_path / "a.plan")

    part, programs, _ = load_programs(tmp_path / "a.plan", 9, plan.digest)

    assert len(part.plan.steps) < len(plan.steps) / 2
    assert 0 < sum(len(b.lo) for b in part.plan.boxes) < sum(len(b.lo) for b in plan.boxes)
    assert np.diff(programs.actions.ptr)[9] == (plan.steps.src == 9).sum()


def test_another_plan_than_expected_is_refused(tmp_path) -> None:
    save_plan(small_plan(), tmp_path / "a.plan")

    with pytest.raises(PlanError, match=r"a\.plan: plan .*, but plan ffffffffffff is to be run"):
        load_part(tmp_path / "a.plan", 0, "f" * 64)


@pytest.mark.parametrize("rank", [-1, 20, 10**9])
def test_a_rank_that_the_plan_lacks_is_refused(tmp_path, rank) -> None:
    save_plan(small_plan(), tmp_path / "a.plan")

    with pytest.raises(InputError, match=f"rank {rank}: the plan has ranks 0 to 19"):
        part_of(load_plan(tmp_path / "a.plan"), rank)
    with pytest.raises(InputError, match=f"rank {rank}: the plan has ranks 0 to 19"):
        load_part(tmp_path / "a.plan", rank)


def test_a_flipped_byte_is_noticed_or_changes_nothing(tmp_path) -> None:
    path = tmp_path / "a.plan"
    save_plan(small_plan("domain-relay"), path)
    digest, good = load_part(path, 3).digest, path.read_bytes()
    noticed = 0

    for position in range(0, len(good), 37):
        data = bytearray(good)
        data[position] ^= 0xFF
        path.write_bytes(data)
        try:
            assert load_part(path, 3).digest == digest
        except PlanError:
            noticed += 1

    assert noticed > len(good) // 37 // 2


def rewritten(path, name, values, packed=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    if values is not None:
        file = BytesIO()
        np.lib.format.write_array(file, np.asarray(values))
        members[name] = file.getvalue()
    with zipfile.ZipFile(path, "w", packed) as archive:
        for member, data in members.items():
            archive.writestr(member, data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("steps.src.npy", lambda c: c[:-1]),
        ("steps.src.npy", lambda c: np.where(np.arange(len(c)) % 2, 99, c)),
        ("steps.dst.npy", lambda c: c - 40),
        ("steps.group.npy", lambda c: c + 7),
        ("steps.bundle.npy", lambda c: c + 1000),
        ("steps.op.npy", lambda c: c + 9),
        ("steps.after_ptr.npy", lambda c: c[::-1]),
        ("steps.after_ptr.npy", lambda c: c + 10**6),
        ("steps.after_ptr.npy", lambda c: c[1:]),
        ("steps.after.npy", lambda c: c * 0 - 1),
        ("steps.after.npy", lambda c: c + 10**6),
        ("bundles.piece.npy", lambda c: c + 10**6),
        ("bundles.tensor.npy", lambda c: c + 5),
        ("slot_bytes.npy", lambda c: c[:0]),
    ],
)
def test_steps_that_contradict_each_other_are_refused(tmp_path, name, change) -> None:
    path = tmp_path / "a.plan"
    save_plan(small_plan(), path)
    rewritten(path, name, change(np.load(path)[name.removesuffix(".npy")]))

    refused = 0
    for rank in range(20):
        try:
            load_part(path, rank)
        except PlanError:
            refused += 1

    assert refused


def test_a_packed_file_is_read_too(tmp_path) -> None:
    path = tmp_path / "a.plan"
    plan = small_plan()
    save_plan(plan, path)
    rewritten(path, "", None, zipfile.ZIP_DEFLATED)

    assert load_part(path, 2).digest == load_plan(path).digest == plan.digest
