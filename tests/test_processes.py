import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hand_plans import HandPlan, column_shards, gathered, relay_chain, row_shards, rows_to_columns

from shardroute.executors.interpreting.interpret import Programs, compile_plan
from shardroute.executors.interpreting.memories import Holdings
from shardroute.executors.interpreting.patterns import SENTINEL, arm, fill_sources, verify
from shardroute.executors.launching.processes import ProcessSession, available_bytes
from shardroute.executors.launching.ranks import keep_to_one_cpu
from shardroute.executors.measuring.copies import calibrate_here
from shardroute.executors.run import run_plan
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, Replicate, Shard, place
from shardroute.planner.plans import TARGET, Lane, Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies import build_topology, load_calibration, load_machine, save_calibration
from shardroute.topologies.costs import COST_TABLES
from shardroute.topologies.errors import InputError, RunError


def needed_bytes(plan: Plan) -> int:
    return sum(int(c.target.n_elements.sum()) * c.itemsize * len(c.members) for c in plan.problem.classes)


def through_all_places() -> Plan:
    """Source to slot, slot to slot, slot to target, target to target and target to slot, and copies within a rank."""
    hand = HandPlan(slots=[48, 48])
    t = hand.tensor((4, 6), row_shards((4, 6), [0]), place((4, 6), Mesh.of({"x": 3}, [1, 2, 3]), [Replicate()]))
    bundle = hand.bundle((t, [(0, 4), (0, 3)]), (t, [(0, 4), (3, 6)]))
    staged = hand.copy(bundle, 0, 1, dst_at=0)
    onward = hand.copy(bundle, 1, 2, [staged], src_at=0, dst_at=1)
    here = hand.copy(bundle, 2, 2, [onward], src_at=1, lane=Lane.LOCAL)
    back = hand.copy(bundle, 2, 1, [here], src_at=TARGET, lane=Lane.RELAY)
    again = hand.copy(bundle, 1, 3, [back], src_at=TARGET, dst_at=1, lane=Lane.RELAY)
    hand.copy(bundle, 3, 3, [again], src_at=1, lane=Lane.LOCAL)
    return hand.build(4)


def strided_box_of_four_dims() -> Plan:
    """A 4-D tensor with an odd itemsize, from one cut to another, into a buffer that is transposed and has gaps."""
    shape = (3, 4, 5, 6)
    source = place(shape, Mesh.of({"x": 2}, [0, 1]), [Shard(1)])
    target = Fragments(shape, [2], [[0, 1, 0, 2]], [[3, 4, 5, 5]], [0], [7], [[1, 4, 13, 70]], [250])
    return make_plan(
        one_tensor(shape, "f8_e4m3", source, target), build_topology(load_machine("cpu-processes"), min_gpus=3), "direct"
    )


def nothing_to_move() -> Plan:
    hand = HandPlan()
    hand.tensor((2, 2), row_shards((2, 2), [0]), Fragments.dense((2, 2), [], np.zeros((0, 2)), np.zeros((0, 2))))
    hand.copy(hand.bundle(), 0, 1)
    return hand.build(2)


@pytest.mark.conformance
@pytest.mark.parametrize(
    "make",
    [
        rows_to_columns, partial(relay_chain, 6, n_chunks=3), partial(gathered, 5), through_all_places,
        strided_box_of_four_dims, nothing_to_move,
    ],
    ids=["rows to columns", "relays", "collectives", "all places", "4-D strides", "nothing"],
)  # fmt: skip
def test_every_kind_of_step_delivers_every_byte_in_every_trial(make: Callable[[], Plan]) -> None:
    plan = make()

    result = run_plan(plan, timeout_s=30, repeats=3)

    assert result.mismatches == ()
    assert (result.verified.bytes, result.verified.mismatches) == (needed_bytes(plan), 0)
    assert len(result.trials_s) == 3
    assert result.timeline.digest == plan.digest


def test_a_measured_timeline_keeps_the_order_that_the_plan_asks_for() -> None:
    plan = relay_chain(5, n_elements=10_000, n_chunks=4)

    timeline = run_plan(plan, timeout_s=30).timeline

    steps = plan.steps
    waiter = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    assert (timeline.start_s[waiter] >= timeline.end_s[steps.after]).all()
    assert timeline.start_s.min() >= 0
    assert (timeline.end_s >= timeline.start_s).all()
    assert timeline.kind == "measured"


def test_thirty_two_ranks_run_in_seconds_and_report_what_they_copied() -> None:
    hand = HandPlan()
    shape = (64, 640)
    t = hand.tensor(shape, row_shards(shape, range(16)), column_shards(shape, range(16, 32)))
    for src in range(16):
        for dst in range(16):
            hand.copy(hand.bundle((t, [(4 * src, 4 * src + 4), (40 * dst, 40 * dst + 40)])), src, 16 + dst)
    plan = hand.build(32)
    told: list[float] = []
    began = time.monotonic()

    result = run_plan(plan, timeout_s=60, progress=told.append)

    assert time.monotonic() - began < 20
    assert result.verified.mismatches == 0
    assert result.n_bytes_copied == 64 * 640 * 2
    assert result.staging_bytes.tolist() == [0] * 32
    assert told[-1] == 1.0
    assert told == sorted(told)


def test_staging_memory_is_what_the_plan_declares() -> None:
    plan = gathered(2)

    result = run_plan(plan, timeout_s=30)

    assert result.staging_bytes.max() == plan.peak_staging_bytes
    assert result.staging_bytes.tolist() == [160] * 4


def test_a_missing_step_is_found_with_tensor_rank_and_index() -> None:
    plan = rows_to_columns()
    kept = [0, 1, 2, 3, 4, 5, 7]  # step 6 brings [4:8, 4:6] to rank 4
    steps = plan.steps
    columns = {name: c[kept] for name, c in steps.columns() if not name.startswith("after")}
    plan = replace(plan, steps=replace(steps, **columns, after_ptr=np.zeros(8, np.int64)))

    result = run_plan(plan, timeout_s=30)

    (found,) = result.mismatches
    assert (found.rank, found.tensor, found.index) == (4, "t0", (4, 4))
    assert 8 <= found.n_bytes <= 16  # 8 elements: every low byte differs, a high byte may be the sentinel's by chance
    assert result.verified.mismatches == found.n_bytes
    assert "first element [4, 4] of t0" in found.text


def run_corrupted(programs: Programs, plan: Plan) -> list[tuple[int, int, int, int]]:
    """(rank, wrong bytes, stray bytes, first stray address) where something was found."""
    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=30) as session:
        (trial,) = session.run()
    return [(rank, f.n_wrong, f.n_stray, f.stray) for rank, f in enumerate(trial.findings) if f.n_wrong or f.n_stray]


def test_a_block_from_the_wrong_place_is_found() -> None:
    plan = rows_to_columns()
    programs, _ = compile_plan(plan)
    src = programs.blocks.src.copy()
    src[0] += 4  # the neighbouring columns

    found = run_corrupted(replace(programs, blocks=replace(programs.blocks, src=src)), plan)

    assert [(rank, n_stray) for rank, _, n_stray, _ in found] == [(2, 0)]
    assert 8 <= found[0][1] <= 16


def test_a_write_outside_of_all_fragments_is_found() -> None:
    plan = rows_to_columns()
    programs, buffers = compile_plan(plan)
    dst = programs.blocks.dst.copy()
    dst[0] += 32  # behind the 32 bytes that the fragment takes

    found = run_corrupted(replace(programs, blocks=replace(programs.blocks, dst=dst)), plan)

    ((rank, n_wrong, n_stray, stray),) = found
    assert (rank, stray) == (2, 32)
    assert 8 <= n_wrong <= 16
    assert n_stray >= 8
    assert buffers.describe(2, stray) == "byte 32 of buffer t0 on rank 2"


def holdings_of(plan: Plan) -> tuple[Holdings, np.ndarray, int, int]:
    programs, buffers = compile_plan(plan)
    return programs.holdings, np.zeros(int(buffers.arena_bytes[0]), np.uint8), int(buffers.target_at[0]), int(buffers.slots_at[0])


@pytest.mark.parametrize("dtype", ["u8", "bf16", "f32", "f64"])
def test_the_pattern_agrees_for_any_cut_differs_between_neighbours_and_never_is_the_sentinel(dtype: str) -> None:
    shape = (5, 7, 300)
    hand = HandPlan()
    whole, rows = place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 1}), [Shard(0)])
    turned = Fragments(shape, whole.rank, whole.lo, whole.hi, whole.buffer, whole.offset, [[1, 5, 35]], whole.buffer_size)
    hand.tensor(shape, whole, rows, dtype)
    hand.tensor(shape, turned, rows, dtype)
    programs, buffers = compile_plan(hand.build(1))
    arena = np.zeros(int(buffers.arena_bytes[0]), np.uint8)
    arm(arena, int(buffers.target_at[0]))

    fill_sources(arena, programs.holdings, 0)

    itemsize = hand.tensors[0][0].itemsize
    first, second = (
        arena[at : at + n].view(f"u{itemsize}") for at, n in zip(buffers.offset[:2], buffers.n_bytes[:2], strict=True)
    )
    values, other = first.reshape(shape), second.reshape(300, 7, 5).T
    n_values = 2 ** (8 * itemsize - 1)
    for axis in range(3):
        same = np.take(values, range(1, shape[axis]), axis) == np.take(values, range(shape[axis] - 1), axis)
        assert same.mean() <= 3 / n_values + 1 / math.sqrt(same.size * n_values) * 4
    assert (values == other).mean() <= 3 / n_values + 0.01
    assert (values % 2 == 1).all()
    assert SENTINEL % 2 == 0


def test_verifying_finds_each_wrong_byte_and_arms_the_memory_again() -> None:
    hand = HandPlan()
    one = place((6, 10), Mesh.of({"x": 1}), [Replicate()])
    apart = Fragments((6, 10), one.rank, one.lo, one.hi, one.buffer, [3], [[12, 1]], [100])
    hand.tensor((6, 10), one, apart, "u16")
    holdings, arena, target_at, slots_at = holdings_of(hand.build(1))
    fill_sources(arena, holdings, 0)
    arm(arena, target_at)
    source, target = arena[:120].view(np.uint16).reshape(6, 10), arena[target_at : target_at + 200].view(np.uint16)
    for i in range(6):
        target[3 + 12 * i : 13 + 12 * i] = source[i]
    target[3 + 12 * 4 + 5] ^= 0x0100
    target[2] = 0

    found = verify(arena, holdings, 0, target_at, slots_at)

    assert (found.n_bytes, found.n_wrong, found.tensor, found.index) == (120, 1, 0, 45)
    assert (found.n_stray, found.stray) == (2, target_at + 4)
    assert verify(arena, holdings, 0, target_at, slots_at).n_wrong >= 60


# Faults


def leftovers() -> set[str]:
    """Names that a run could leave in the places where shared memory and sockets live."""
    places = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    return {str(p) for place in places if place.is_dir() for p in place.iterdir() if "shardroute" in p.name}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")  # orphans wait for init to reap them


def wait_until_gone(pids: list[int], within_s: float = 5.0) -> list[int]:
    end = time.monotonic() + within_s
    while (left := [p for p in pids if alive(p)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def long_chain() -> Plan:
    """A relay that takes some tenths of a second: 6 ranks, thousands of steps that all wait for each other."""
    return relay_chain(6, n_elements=8, n_chunks=2000)


def run_and_hurt(plan: Plan, rank: int, signal_number: int, timeout_s: float) -> tuple[str, list[int], float]:
    """Run a plan again and again and send one rank a signal in the middle; the error, all pids, seconds from signal to error."""
    programs, _ = compile_plan(plan)
    hurt_at: list[float] = []
    pids: list[int] = []
    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=timeout_s, n_trials=200) as session:

        def hurt(done: float) -> None:
            if done > 0 and not hurt_at:
                pids.extend(session.pids)
                os.kill(pids[rank], signal_number)
                hurt_at.append(time.monotonic())

        with pytest.raises(RunError) as caught:
            session.run(hurt)
        took_s = time.monotonic() - hurt_at[0]
    return str(caught.value), pids, took_s


@pytest.mark.faults
def test_a_killed_rank_ends_the_run_with_its_name_and_step_and_leaves_nothing() -> None:
    before = leftovers()

    message, pids, took_s = run_and_hurt(long_chain(), 3, signal.SIGKILL, timeout_s=60)

    assert took_s < 5
    assert re.match(
        r"rank 3 (at step \d+ \(copy of 1 piece, 16 B, rank 3 -> rank 4\)|while it|before|after).*killed \(SIGKILL", message
    )
    assert "All 6 ranks have been ended" in message
    assert len(pids) == 6
    assert wait_until_gone(pids) == []
    assert leftovers() == before
    assert run_plan(rows_to_columns(), timeout_s=30).verified.mismatches == 0


@pytest.mark.faults
def test_a_stopped_rank_ends_the_run_at_its_deadline() -> None:
    message, pids, _ = run_and_hurt(long_chain(), 2, signal.SIGSTOP, timeout_s=4)

    told = (
        r"rank 2 (at step|while|before|after) .*: is stopped by a signal and held up the run until the 4 s that --timeout "
        "allows were over"
    )
    assert re.match(told, message)
    assert "waited for rank 2 to" in message
    assert wait_until_gone(pids) == []


@pytest.mark.faults
def test_a_rank_that_raises_ends_the_run_with_what_it_said() -> None:
    plan = rows_to_columns()
    programs, _ = compile_plan(plan)
    box = programs.holdings.box.copy()
    box[1] = 10**6  # rank 1 can't fill its source weights

    with ProcessSession(
        plan, replace(programs, holdings=replace(programs.holdings, box=box)), digest=plan.digest, timeout_s=30
    ) as session:
        with pytest.raises(RunError, match=r"rank 1 while it got ready: IndexError: .*1000000"):
            session.run()
        pids = list(session.pids)

    assert wait_until_gone(pids) == []


@pytest.mark.faults
def test_ranks_refuse_programs_of_another_plan() -> None:
    plan, other = rows_to_columns(), relay_chain(6)
    programs, _ = compile_plan(other)

    with (
        ProcessSession(plan, programs, digest=other.digest, timeout_s=30) as session,
        pytest.raises(RunError, match=f"are of plan {other.digest[:12]}, but plan {plan.digest[:12]} is to be run"),
    ):
        session.run()


@pytest.mark.faults
def test_a_wait_that_nothing_ends_is_given_up_at_the_deadline_and_says_for_whom() -> None:
    plan = relay_chain(3)
    programs, _ = compile_plan(plan)
    wait = programs.actions.wait.copy()
    wait[0] = 1  # rank 1 waits for its own relay instead of what rank 0 sends
    stuck = replace(programs, actions=replace(programs.actions, wait=wait))
    began = time.monotonic()

    with (
        ProcessSession(plan, stuck, digest=plan.digest, timeout_s=3) as session,
        pytest.raises(
            RunError,
            match=r"rank 1 at step 1 .* the 3 s that --timeout allows were over \(rank 1 waited for rank 1 to complete step 1",
        ),
    ):
        session.run()

    assert time.monotonic() - began < 8


@pytest.mark.faults
@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_when_their_caller_is_killed_even_one_that_is_stopped(stopped: bool) -> None:
    code = """
import sys
from hand_plans import relay_chain
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.launching.processes import ProcessSession
plan = relay_chain(6, n_elements=8, n_chunks=2000)
with ProcessSession(plan, compile_plan(plan)[0], digest=plan.digest, timeout_s=60, n_trials=500) as session:
    session.run(lambda done: done and print(*session.pids, flush=True))
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]

    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    caller.kill()
    caller.wait()
    caller.stdout.close()

    assert len(pids) == 6
    assert wait_until_gone(pids, within_s=10) == []


def test_a_plan_that_needs_more_memory_than_is_free_is_refused_before_anything_starts() -> None:
    shape = (2**20, 2**20)
    hand = HandPlan()
    hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [1]))

    with pytest.raises(InputError, match=r"takes 4\.40 TB of memory .* are free; plan a smaller copy of the model with --scale"):
        run_plan(hand.build(2))


def test_free_memory_is_a_sane_number() -> None:
    free = available_bytes()

    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "pigeon"}, "transport 'pigeon' is not known; expected one of processes"),
        ({"repeats": 0}, "repeats: expected 1 to 10000, found 0"),
        ({"repeats": 2**63}, f"repeats: expected 1 to 10000, found {2**63}"),
        ({"timeout_s": math.nan}, r"timeout: expected seconds above 0, up to 1e\+09, found nan"),
        ({"timeout_s": 0.0}, "timeout: expected seconds above 0"),
    ],
)
def test_impossible_options_are_refused(options: "dict[str, str]", message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_plan(rows_to_columns(), **options)  # type: ignore[arg-type]


def test_running_leaves_no_open_files_and_no_children() -> None:
    run_plan(rows_to_columns(), timeout_s=30)
    gc.collect()  # what other tests dropped without closing is not this one's
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir())) if fds.exists() else 0

    for _ in range(3):
        run_plan(rows_to_columns(), timeout_s=30)

    assert (len(list(fds.iterdir())) if fds.exists() else 0) <= before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_calibration_of_this_machine_can_be_saved_and_read(tmp_path: Path) -> None:
    told: list[float] = []

    calibration = calibrate_here(progress=told.append)

    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    # None of its parts is one long step: each run of a plan tells shares, and each case of attention.
    assert max(np.diff([0.0, *told])) < 0.15
    assert calibration.machine == "cpu-processes"
    assert 0 <= calibration.launch_s < 1e-2
    assert 0 <= calibration.piece_s < 1e-3
    assert calibration.copy_Bps is not None
    assert 1e7 < calibration.copy_Bps < 1e12
    assert calibration.cores is not None
    assert 0 < calibration.cores <= (os.cpu_count() or 1)
    tables = ("attend_f32", "grad_f32", "attend_f64", "grad_f64", "sums")
    assert {f"{table}.{key}" for table in tables for key in COST_TABLES[table][1]} <= {f.key for f in calibration.figures}
    # Of wide heads a score takes some nanoseconds: 4 x 64 FLOP at 10 to 500 GFLOP/s, and its exponential.
    assert calibration.attend_f32 is not None
    assert 0.5e-9 < calibration.attend_f32.score_s + 64 * calibration.attend_f32.product_s < 1e-7
    save_calibration(calibration, tmp_path / "here.toml")
    assert load_calibration(str(tmp_path / "here.toml")) == calibration


def test_more_ranks_than_the_system_has_open_files_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardroute.executors.launching.processes.files_needed", lambda n_ranks: 2**62)

    with pytest.raises(InputError, match=r"running 6 ranks takes .* open files .*ulimit -Hn.* or plan for fewer ranks"):
        run_plan(rows_to_columns())


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system doesn't bind processes to CPUs")
def test_what_computes_is_bound_to_cpus_in_turn_where_each_gets_as_many_ranks() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    n_ranks = 2 * len(cpus)

    try:
        for rank in range(n_ranks):
            keep_to_one_cpu(rank, n_ranks)
            assert os.sched_getaffinity(0) == {cpus[rank % len(cpus)]}
            os.sched_setaffinity(0, cpus)
        if len(cpus) > 1:
            keep_to_one_cpu(0, n_ranks + 1)
            assert os.sched_getaffinity(0) == set(cpus)
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_killed_nursery_is_told_apart_from_ranks_that_never_started() -> None:
    plan = long_chain()
    programs, _ = compile_plan(plan)

    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=60, n_trials=10_000) as session:
        while not all(session.pids):
            time.sleep(0.01)
        os.kill(session._nursery.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"the ranks were lost while they ran: .* was killed \(SIGKILL"):
            session.run()
