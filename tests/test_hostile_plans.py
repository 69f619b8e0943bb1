"""Plans made by hand to do harm: refused before a byte moves, whatever they are wrong in; and none reaches beyond its buffers."""

import io
import json
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.interpreting.interpret import Programs, compile_plan
from shardroute.executors.interpreting.memories import Buffers, Part
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import SOURCE, Op, Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import ShardrouteError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


def relay_plan(strategy: str = "m2n-pack") -> Plan:
    """Rows of two ranks to four replicas, packed: with staging, barriers and bundles of several pieces."""
    held = place((12, 8), Mesh.of({"x": 2}), [Shard(0)])
    needed = place((12, 8), Mesh.of({"x": 2, "y": 2}, range(2, 6)), [Replicate(), Shard(1)])
    return make_plan(one_tensor((12, 8), "f32", held, needed), build_topology(load_machine("dgx-h100"), None, 6), strategy)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("good") / "a.plan"
    save_plan(relay_plan(), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def column(members: dict[str, bytes], name: str) -> np.ndarray:
    return np.load(io.BytesIO(members[f"{name}.npy"]))


def written(members: dict[str, bytes], changed: dict[str, np.ndarray | dict[str, object]], path: Path) -> Path:
    """A plan file whose columns, or keys of whose header, are others."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            new = changed.get(name.removesuffix(".npy"))
            if isinstance(new, dict):
                data = json.dumps(json.loads(data) | new).encode()
            elif new is not None:
                file = io.BytesIO()
                np.save(file, np.asarray(new, dtype=np.load(io.BytesIO(data)).dtype))
                data = file.getvalue()
            archive.writestr(name, data)
    return path


def first(values: np.ndarray, where: np.ndarray, new: int) -> np.ndarray:
    """The column with another value in the first row for which `where` holds."""
    assert where.any()
    changed = values.copy()
    changed[np.argmax(where)] = new
    return changed


# Each is what a stranger may try: what it changes in a good plan, and words of the refusal.
ATTACKS = {
    "a piece beyond its slot": (
        lambda c: {"bundles.offset": first(c("bundles.offset"), c("bundles.offset") >= 0, 2**40)}, "leave its .* bytes"),
    "a slot smaller than what it gets": (lambda c: {"slot_bytes": np.ones_like(c("slot_bytes"))}, "leave its 1 bytes"),
    "a slot of 2^61 bytes": (lambda c: {"slot_bytes": np.full_like(c("slot_bytes"), 2**61)}, "bytes|memory"),
    "a slot that isn't declared": (lambda c: {"steps.dst_at": first(c("steps.dst_at"), c("steps.dst_at") >= 0, 999)}, "dst_at"),
    "a slot before the first": (lambda c: {"steps.src_at": first(c("steps.src_at"), c("steps.src_at") >= 0, -9)}, "src_at"),
    "a rank that there isn't": (lambda c: {"steps.dst": first(c("steps.dst"), c("steps.dst") >= 0, 6)}, "column dst"),
    "a rank below 0": (lambda c: {"steps.src": first(c("steps.src"), c("steps.src") >= 0, -7)}, "column src"),
    "a tensor that there isn't": (
        lambda c: {"bundles.tensor": first(c("bundles.tensor"), c("bundles.tensor") >= 0, 5)}, "bundles.tensor"),
    "source weights read where they aren't": (
        lambda c: {"steps.src": first(c("steps.src"), (c("steps.src_at") == SOURCE) & (c("steps.op") == Op.COPY), 4)},
        "doesn't hold|take"),
    "a fragment behind the end of its buffer": (
        lambda c: {"fragments.offset": first(c("fragments.offset"), c("fragments.rank") >= 0, 10**6)}, "buffer"),
    "a fragment before its buffer": (
        lambda c: {"fragments.offset": first(c("fragments.offset"), c("fragments.rank") >= 0, -8)}, "offset|buffer"),
    "strides that lead out of the buffer": (
        lambda c: {"fragments.strides": first(c("fragments.strides"), c("fragments.strides") > 1, 2**50)}, ""),
    "strides that wrap": (
        lambda c: {"fragments.strides": first(c("fragments.strides"), c("fragments.strides") > 1, -(2**63))}, ""),
    "strides that put elements into one place": (
        lambda c: {"fragments.strides": np.where(np.arange(len(c("fragments.strides"))) >= 4, 0, c("fragments.strides"))}, ""),
    "boxes that leave the tensor": (lambda c: {"boxes.hi": first(c("boxes.hi"), c("boxes.hi") > 0, 2**31)}, "box|piece"),
    "boxes that overlap": (lambda c: {"boxes.lo": np.zeros_like(c("boxes.lo"))}, "overlap|piece|box"),
    "a step that waits for a later one": (
        lambda c: {"steps.after": first(c("steps.after"), c("steps.after") >= 0, len(c("steps.op")) - 1)}, "earlier|after"),
    "a step that waits for itself": (
        lambda c: {"steps.after": np.repeat(np.arange(len(c("steps.op"))), np.diff(c("steps.after_ptr")))}, ""),
    "no waiting at all": (
        lambda c: {"steps.after": c("steps.after")[:0], "steps.after_ptr": c("steps.after_ptr") * 0}, "without waiting|wait"),
    "a group with a rank that there isn't": (lambda c: {"group_ranks": c("group_ranks") + 4}, "group_ranks"),
    "more ranks than the machine has": (lambda c: {"header.json": {"n_ranks": 2**31}}, "ranks"),
    "ranks below 0": (lambda c: {"header.json": {"n_ranks": -1}}, ""),
    "a dtype that there isn't": (lambda c: {"header.json": {"tensors": [{"name": "t", "dtype": "__import__('os')"}]}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_plan_that_would_do_harm_is_refused_before_any_process_starts(members, attack, cli, tmp_path, monkeypatch) -> None:
    change, words = ATTACKS[attack]
    path = written(members, change(lambda name: column(members, name)), tmp_path / "x.plan")
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(a))

    code, out, err = cli("run", str(path))

    assert (code, out, started) == (2, "", [])
    assert err.startswith("error: ")
    assert re.search(words, " ".join(err.split()))


def test_the_plan_that_the_attacks_change_is_a_good_one(members, cli, tmp_path) -> None:
    code, out, _ = cli("run", str(written(members, {}, tmp_path / "x.plan")), "--timeout", "60")

    assert code == 0
    assert "all right" in out


def test_a_plan_is_written_where_it_is_told_to_whatever_its_tensors_are_called(tmp_path) -> None:
    held = place((4,), Mesh.of({"x": 2}), [Shard(0)])
    problem = one_tensor((4,), "f32", held, place((4,), Mesh.of({"x": 2}, [2, 3]), [Shard(0)]), name="../../../etc/x\n\x1b[2J")
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), None, 4), "direct")

    save_plan(plan, tmp_path / "a.plan")

    assert os.listdir(tmp_path) == ["a.plan"]


PLANS = [relay_plan(name) for name in ("m2n-pack", "domain-relay", "gather-broadcast")]


def assert_inside(programs: Programs, buffers: Buffers) -> None:
    """Every run of every block is read from a buffer of its rank, and written to a target buffer or a slot: one by one."""
    ends = buffers.offset + buffers.n_bytes

    def lies(rank: int, at: int, n_bytes: int, parts: tuple[Part, ...]) -> bool:
        inside = (buffers.rank == rank) & np.isin(buffers.part, parts) & (buffers.offset <= at) & (at + n_bytes <= ends)
        return bool(inside.any())

    blocks, forms = programs.blocks, programs.forms
    action = np.repeat(np.arange(len(programs.actions.step)), np.diff(programs.actions.block_ptr))
    driver = np.searchsorted(programs.actions.ptr, action, side="right") - 1
    for i in range(len(blocks.src)):
        form = int(blocks.form[i])
        run = int(blocks.n_bytes[i]) if form < 0 else int(forms.run[form])
        count = () if form < 0 else tuple(forms.count[form].tolist())
        for at in np.ndindex(count):
            steps = (0, 0) if form < 0 else (int(np.dot(at, forms.src_stride[form])), int(np.dot(at, forms.dst_stride[form])))
            src, dst = int(blocks.src[i]) + steps[0], int(blocks.dst[i]) + steps[1]
            assert lies(int(driver[i]), src, run, tuple(Part))
            assert lies(int(blocks.to[i]), dst, run, (Part.TARGET, Part.SLOT))


@given(st.sampled_from(PLANS), st.data())
@settings(max_examples=60)
def test_whatever_compiles_reads_and_writes_its_own_buffers_alone(plan: Plan, data) -> None:
    numbers = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, -(2**31)]))
    try:
        for _ in range(data.draw(st.integers(0, 3))):
            group, name = data.draw(
                st.sampled_from([("steps", n) for n in ("src", "dst", "src_at", "dst_at", "bundle")]
                                + [("bundles", n) for n in ("piece", "offset", "tensor")] + [("", "slot_bytes")])
            )  # fmt: skip
            values = getattr(getattr(plan, group) if group else plan, name).copy()
            if len(values):
                value = data.draw(numbers)
                values[data.draw(st.integers(0, len(values) - 1))] = np.clip(value, *_bounds(values.dtype))
            plan = replace(plan, **({group: replace(getattr(plan, group), **{name: values})} if group else {name: values}))
        programs, buffers = compile_plan(plan)
    except ShardrouteError:
        return

    assert_inside(programs, buffers)


def _bounds(dtype: np.dtype) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
