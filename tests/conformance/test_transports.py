"""What every transport must do; `pytest -m conformance` runs it over all that can run here."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conformance_plans import CASES, N_RANKS, UNPROVED, all_to_all, signals_only
from hand_plans import relay_chain, rows_to_columns

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.launching.processes import ProcessSession
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.run import run_plan
from shardroute.executors.transports.libraries import MPI
from shardroute.planner.check import check
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import RunError

pytestmark = pytest.mark.conformance

Outcomes = Callable[[str], dict[str, object]]
RunRanks = Callable[..., list[str]]


def shared_by_mpich() -> set[Path]:
    """The files of shared memory that MPICH has made on this machine and that have their name still."""
    return set(Path("/dev/shm").glob("mpich_*"))


def left_of(pids: Sequence[int], within_s: float = 5.0) -> list[int]:
    """The processes that still run after a while; whoever adopts a killed one takes moments to notice its end."""
    until_s = time.monotonic() + within_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


def needed_bytes(plan: Plan) -> int:
    return sum(int(c.target.n_elements.sum()) * c.itemsize * len(c.members) for c in plan.problem.classes)


@pytest.mark.parametrize("name", CASES)
def test_every_byte_arrives_and_no_other_changes_in_every_run_of_a_plan(outcome_of: Outcomes, name: str) -> None:
    plan = CASES[name]()

    found = outcome_of(name)

    assert (found["n_trials"], found["n_bytes"], found["n_wrong"]) == (3, needed_bytes(plan), 0)


def test_the_cases_are_proved_plans_but_for_what_rests_on_the_order_of_queues() -> None:
    for name, make in CASES.items():
        if name not in UNPROVED:
            check(make())


@pytest.mark.parametrize("name", ["order along relays", "greedy", "zero bytes"])
def test_a_timeline_keeps_the_order_that_the_plan_asks_for(outcome_of: Outcomes, name: str) -> None:
    steps = CASES[name]().steps

    found = outcome_of(name)

    start_s, end_s = found["start_s"], found["end_s"]
    assert isinstance(start_s, list)
    assert isinstance(end_s, list)
    assert len(start_s) == len(steps)
    for step in range(len(steps)):
        for before in steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist():
            assert start_s[step] >= start_s[before]
        assert 0 <= start_s[step] <= end_s[step]


def test_run_plan_starts_all_ranks_here_and_reports_what_the_plan_declares(transport: str) -> None:
    plan = CASES["greedy"]()

    result = run_plan(plan, transport=transport, timeout_s=60)

    assert result.mismatches == ()
    assert result.staging_bytes.max() == plan.peak_staging_bytes
    assert result.timeline.digest == plan.digest
    assert f"transport {transport} " in result.timeline.source


def test_a_second_plan_is_refused_while_a_first_one_goes_on_over_the_same_ranks(transport: str, outcome_of: Outcomes) -> None:
    if transport == PROCESSES:
        pytest.skip("each of its runs has ranks and memory of its own")

    found = outcome_of("two plans at once")

    refused = found["refused"]
    assert isinstance(refused, list)
    assert len(refused) == N_RANKS - 1
    assert all("goes on over these ranks; wait for it first" in error for error in refused)


def test_a_wrong_digest_on_one_rank_is_refused_on_every_rank_before_a_byte_moves(transport: str, run_ranks: RunRanks) -> None:
    plan, other = signals_only(n_turns=20), signals_only(n_turns=22)
    if transport == PROCESSES:  # its ranks can't be given different plans, only other programs than those of the plan
        programs, _ = compile_plan(other)
        session = ProcessSession(plan, programs, digest=other.digest, timeout_s=30)
        with session, pytest.raises(RunError, match=r"are of plan .* but plan .* is to be run"):
            session.run()
        assert session._board.phase.max() == 0
        return

    errors = run_ranks([plan] * (N_RANKS - 1) + [other])

    assert len(errors) == N_RANKS
    for error in errors:
        assert f"most have {plan.digest[:12]}, rank {N_RANKS - 1} has {other.digest[:12]}; no byte was moved" in error


def test_a_rank_that_never_comes_ends_the_run_at_its_deadline_on_every_rank(transport: str, run_ranks: RunRanks) -> None:
    if transport == PROCESSES:
        pytest.skip("its ranks are started by one process; tests/test_processes.py stops one of them instead")
    before = shared_by_mpich()
    began = time.monotonic()

    errors = run_ranks([all_to_all(n_ranks=4)] * 4, timeout_s=6, stall=2)

    assert time.monotonic() - began < 60
    for rank in (0, 1, 3):
        assert f"rank {rank} " in errors[rank]
        assert "couldn't join the 4 ranks of the run: rank 2 didn't come within the 6 s that --timeout allows" in errors[rank]
    left = shared_by_mpich() - before
    while left & shared_by_mpich() and time.monotonic() - began < 60:  # what other tests use meanwhile goes away
        time.sleep(0.1)
    assert left & shared_by_mpich() == set()


def test_a_world_of_another_size_than_the_plan_is_refused_on_every_rank(transport: str, run_ranks: RunRanks) -> None:
    if transport == PROCESSES:
        pytest.skip("it starts as many ranks as the plan has")

    errors = run_ranks([rows_to_columns()] * 2)

    assert [("the plan is for 6 ranks, and 2 were started" in error) for error in errors] == [True, True]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"rank 3 .*was killed \(SIGKILL"),
        (signal.SIGSTOP, r"rank 3 .*is stopped by a signal and held up the run until the 9 s that --timeout allows were over"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_dies_or_stops_ends_the_run_with_its_name_and_leaves_no_process(
    transport: str, number: signal.Signals, words: str
) -> None:
    if transport == MPI:
        pytest.skip("mpiexec starts and ends its ranks")
    plan = relay_chain(6, n_elements=8, n_chunks=20)
    programs, buffers = compile_plan(plan)
    messages = None if transport == PROCESSES else lay_messages(plan, programs, buffers)
    session = ProcessSession(
        plan, programs, digest=plan.digest, timeout_s=9, n_trials=10_000, transport=transport, messages=messages
    )  # fmt: skip

    with session, pytest.raises(RunError, match=words):
        session.run(lambda fraction: os.kill(session.pids[3], number) if fraction > 0 else None)

    assert left_of(session.pids) == []
