"""Faults injected on purpose: ranks that die, stop or lie, links that drop, stall, cut or corrupt, full memory, full disks.

Whatever is done, whoever survives ends in time with an error that names rank, step and peer, its weights are whole and old,
nothing is left behind, and the next transfer works. `fault_cases` lists the faults of transfers over gloo and MPI. The gate runs
a part of them, `pytest -m faults` all.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from fault_cases import CASES, IN_GATE, N_RANKS, OVER_MPI, Case
from hand_plans import HandPlan, relay_chain, row_shards, rows_to_columns

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.piece_sums import NONE, describe_wrong, piece_rows
from shardroute.executors.launching.launches import _LAUNCHERS
from shardroute.executors.launching.mpiexec import MpiexecSession, find_mpiexec
from shardroute.executors.launching.processes import ProcessSession
from shardroute.executors.run import run_plan
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.timelines import load_timeline, save_timeline
from shardroute.topologies.errors import InputError, RunError

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent
# What ranks may take past their deadline to say so, on a machine that others use too.
_PATIENCE_S = 4.0
_ENDS_S = 180.0


def chosen(request: pytest.FixtureRequest, names: Sequence[str]) -> list[str]:
    """Those that are to run: all where faults were asked for, else what the gate runs."""
    every = "faults" in request.config.option.markexpr
    return [name for name in names if every or name in IN_GATE]


@pytest.fixture
def asked_for(request: pytest.FixtureRequest, name: str) -> None:
    """Skip what the gate leaves out."""
    if not chosen(request, [name]):
        pytest.skip("run by `pytest -m faults`")


def play(transport: str, names: list[str], folder: Path) -> dict[str, list[object]]:
    """Run cases; what each rank of each left, None for one that left nothing."""
    for name in names:
        (folder / name).mkdir()
    told = {variable for at in _LAUNCHERS for variable in (at.rank, at.size)}
    temporary = folder / "temporary"
    temporary.mkdir()
    before = left_by_name(temporary)
    env = {k: v for k, v in os.environ.items() if k not in told} | {"PYTHONPATH": str(HERE), "TMPDIR": str(temporary)}
    launcher = [find_mpiexec(), "-n", str(N_RANKS)] if transport == "mpi" else []
    command = [*launcher, sys.executable, str(HERE / "fault_ranks.py"), str(folder), transport, *names]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    program = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    out, _ = program.communicate(timeout=_ENDS_S)
    assert left_of_session(program.pid) == [], out[-2000:]
    mine, until = left_by_name(temporary) - before, time.monotonic() + _PATIENCE_S
    while mine & left_by_name(temporary) and time.monotonic() < until:  # what other tests use meanwhile goes away
        time.sleep(0.1)
    assert mine & left_by_name(temporary) == set()
    if transport == "mpi":
        assert not any(Path(name).exists() for name in (folder / "segments").read_text().split())
    files = {name: [folder / name / f"{rank}.json" for rank in range(N_RANKS)] for name in names}
    return {name: [json.loads(f.read_text()) if f.exists() else None for f in files[name]] for name in names}


def left_of_session(session: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = text.rpartition(") ")[2].split()
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(text)
    return found


def left_by_name(temporary: Path) -> set[str]:
    """What cases have left by name: in the folder that they had for temporary files, as shared memory, as network namespaces."""
    found = {str(path) for path in temporary.iterdir()}
    for place in (Path("/dev/shm"), Path("/run/netns")):
        if place.is_dir():
            found |= {str(p) for p in place.iterdir() if re.search(r"shardroute|gloo|torch_|sr-", p.name)}
    return found


@pytest.fixture(scope="module")
def over_gloo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What ranks saw in all cases that are to run, over gloo."""
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    return play("gloo", chosen(request, list(CASES)), tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def over_mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What ranks saw over MPI; those that die there take all others with them, which mpiexec sees to."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'shardroute[mpi]')")
    return play("mpi", chosen(request, OVER_MPI), tmp_path_factory.mktemp("mpi"))


def judge(case: Case, ranks: list[object], *, leaves_files: bool = True) -> None:
    """What must hold after every fault."""
    hurt, survivors = case.rank, [rank for rank in range(N_RANKS) if rank != case.rank]
    assert (ranks[hurt] is None) == case.dies
    assert all(isinstance(ranks[rank], dict) for rank in survivors), ranks
    seen: dict[int, dict[str, object]] = {rank: found for rank, found in enumerate(ranks) if isinstance(found, dict)}
    errors = {rank: str(seen[rank]["error"]) for rank in survivors}
    for rank, found in seen.items():
        assert found["misread"] == [], rank
        assert rank == hurt or float(str(found["took_s"])) < case.timeout_s + _PATIENCE_S
        if leaves_files:
            assert (found["files"], found["threads"]) == (0, 0), rank
    if case.fails:
        in_place = case.spare_bytes == 0  # a source, or who has all of its own, may be done then
        failed = [rank for rank in survivors if errors[rank] or not in_place]
        for rank in failed:
            assert any(re.search(pattern, errors[rank]) for pattern in case.fails), (rank, errors[rank])
        assert any(f"rank {hurt}" in errors[rank] for rank in failed), errors
    else:
        assert set(errors.values()) == {""}
    for rank, found in seen.items():
        if rank > 0 and case.holds not in ("", "either") and (errors.get(rank) or not case.fails):
            assert found["holds"] == case.holds, rank
            assert found["version"] == {"old": 1, "new": 2, "torn": None}[case.holds]
    lost_for_good = case.dies and hurt == 0  # nobody else holds what rank 0 does
    for rank, found in seen.items():
        again = str(found["again"])
        if lost_for_good:
            assert re.match(r"InfeasibleError: tensor t0: rank 1 needs \[0:4, 0:16\] of a tensor .*", again), again
        else:
            assert again == "version 3", (rank, again)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("asked_for")
def test_a_fault_over_gloo_ends_in_words_with_whole_weights_and_the_next_transfer_works(
    name: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue("over_gloo")[name]

    judge(CASES[name], ranks)


@pytest.mark.parametrize("name", OVER_MPI)
@pytest.mark.usefixtures("asked_for")
def test_a_fault_over_mpi_ends_in_words_with_whole_weights_and_the_next_transfer_works(
    name: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue("over_mpi")[name]

    judge(CASES[name], ranks, leaves_files=False)


def long_chain() -> Plan:
    return relay_chain(6, n_elements=8, n_chunks=2000)


def through_a_slot() -> Plan:
    """Rank 0 to a slot of rank 1, from there to rank 2."""
    hand = HandPlan(slots=[4096])
    t = hand.tensor((2048,), row_shards((2048,), [0]), row_shards((2048,), [2]), "u16")
    bundle = hand.bundle((t, [(0, 2048)]))
    first = hand.copy(bundle, 0, 1, dst_at=0)
    hand.copy(bundle, 1, 2, [first], src_at=0)
    return hand.build(3)


def test_a_process_killed_before_it_is_ready_ends_the_run_with_its_name() -> None:
    plan = long_chain()
    programs, _ = compile_plan(plan)

    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=30, n_trials=100) as session:
        while not session.pids[2]:
            time.sleep(0.001)
        os.kill(session.pids[2], signal.SIGKILL)
        with pytest.raises(RunError, match=r"rank 2 .*was killed \(SIGKILL.*All 6 ranks have been ended"):
            session.run()


def test_a_process_of_mpi_that_is_killed_ends_the_run_with_the_step_of_each_rank() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'shardroute[mpi]')")
    plan = relay_chain(4, n_elements=8, n_chunks=500)
    segments: list[str] = []

    with MpiexecSession(plan, timeout_s=60, n_trials=100) as session:

        def kill(_: float) -> None:
            pid, at_step, *_ = session._seen[:, 2].tolist()
            if pid and at_step > 0 and not segments:
                segments.extend(re.findall(r" (/dev/shm/mpich_\S+)", Path(f"/proc/{pid}/maps").read_text()))
                os.kill(pid, signal.SIGKILL)

        names = r"it names rank \d\. Where each rank was: .*; rank 2 (at step \d+|before|after)"
        died = rf"a rank died \(exit code or signal 9\), and mpiexec ended all others with it; {names}"
        with pytest.raises(RunError, match=died):
            session.run(kill)

    assert segments
    assert not any(Path(segment).exists() for segment in segments)


def test_a_process_stopped_and_resumed_in_time_delivers_every_byte() -> None:
    plan = long_chain()
    programs, _ = compile_plan(plan)
    stopped: list[float] = []

    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=60, n_trials=3) as session:

        def stop(done: float) -> None:
            if done > 0 and not stopped:
                os.kill(session.pids[3], signal.SIGSTOP)
                time.sleep(0.3)
                stopped.append(done)
                os.kill(session.pids[3], signal.SIGCONT)

        trials = session.run(stop)

    assert stopped
    assert all(f.n_wrong == f.n_stray == 0 for trial in trials for f in trial.findings)


@pytest.mark.parametrize(("rank", "target", "peer"), [(1, False, 0), (2, True, 1)], ids=["a slot", "destination weights"])
def test_a_process_whose_memory_is_scribbled_on_is_named_by_checksums(rank: int, target: bool, peer: int) -> None:
    plan = through_a_slot()
    programs, _ = compile_plan(plan)
    rows = piece_rows(plan)

    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=60, n_trials=400, pieces=rows) as session:
        memory = session._shared.arena(rank)
        at = int((programs.target_at if target else programs.slots_at)[rank]) + 1001

        def scribble(done: float) -> None:
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                memory[at] ^= 0xFF

        trials = session.run(scribble)

    # A relay takes its checksum after it has copied, so what changes in between is found by the next rank.
    wrong = {row for trial in trials if (row := trial.wrong_pieces[rank]) != NONE}
    assert wrong
    place = "destination weights" if target else "staging slot"
    for row in wrong:
        assert re.match(
            rf"rank {rank} at step \d \(copy of 1 piece, 4.10 kB, rank {peer} -> rank {rank}\): piece \[0:2048\] of t0 in its "
            rf"{place} isn't what rank {peer} sent, by its checksum", describe_wrong(plan, rows, row),
        )  # fmt: skip


def limited(limit: int, n_bytes: int, call: Callable[[], object]) -> str:
    """What a call in a process of its own raises under a limit on its resources, "" for nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(limit, (n_bytes, n_bytes))
            call()
            words = ""
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as told:
        return told.read()


def test_a_full_disk_while_a_plan_is_saved_leaves_the_old_file_whole(tmp_path: Path) -> None:
    small = rows_to_columns()
    save_plan(small, tmp_path / "r.plan")

    error = limited(resource.RLIMIT_FSIZE, 2**14, lambda: save_plan(relay_chain(9, n_chunks=900), tmp_path / "r.plan"))

    assert re.match(r"InputError: can't write the plan to .*r\.plan: File too large", error)
    assert load_plan(tmp_path / "r.plan").digest == small.digest
    assert [path.name for path in tmp_path.iterdir()] == ["r.plan"]


def test_a_full_disk_while_a_timeline_is_saved_leaves_the_old_file_whole(tmp_path: Path) -> None:
    plan = relay_chain(3)
    timeline = run_plan(plan, timeout_s=60).timeline
    save_timeline(timeline, tmp_path / "t.json")

    error = limited(resource.RLIMIT_FSIZE, 64, lambda: save_timeline(timeline, tmp_path / "t.json"))

    assert re.match(r"InputError: can't write .*t\.json: File too large", error)
    assert load_timeline(tmp_path / "t.json").digest == plan.digest
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_processes_without_memory_for_their_arenas_end_in_words() -> None:
    # More than any process of the run may have: the one that starts it is the largest, and may have a little more than it has.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    shape = ((used + 2**29) // 2,)  # bf16
    hand = HandPlan()
    hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [1]))
    plan = hand.build(2)

    error = limited(resource.RLIMIT_AS, used + 2**28, lambda: run_plan(plan, timeout_s=60))

    assert re.match(r"(RunError: the shared memory of the run can't be made|InputError: running this plan .*takes)", error), error


def test_checksums_change_nothing_of_a_run_that_goes_well() -> None:
    plan = through_a_slot()

    result = run_plan(plan, timeout_s=60, repeats=2, verify=True)

    assert result.corrupted == ()
    assert result.verified.mismatches == 0


def test_checksums_of_a_plan_that_adds_up_or_lies_on_gpus_are_refused() -> None:
    with pytest.raises(InputError, match=r"checksums on GPUs are taken by torch|can't run here"):
        run_plan(rows_to_columns(), transport="nccl", verify=True)
    assert np.all(piece_rows(rows_to_columns()).before == NONE)
