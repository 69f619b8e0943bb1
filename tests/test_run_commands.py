"""`shardroute run` as launchers and people start it: who is which rank, what is refused, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_ranks import descendants, hear_ctrl_c
from hand_plans import HandPlan, relay_chain, row_shards, rows_to_columns

from shardroute.executors.launching.launches import _LAUNCHERS, find_place, first_host
from shardroute.executors.run import run_as_rank
from shardroute.executors.transports.seam import Place
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.plan_files import save_plan
from shardroute.topologies.errors import InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2", "SLURM_STEP_NODELIST": "gpu[07-09,12],gpu3"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan of six ranks, in a file."""
    save_plan(rows_to_columns(), tmp_path / "r.plan")
    return str(tmp_path / "r.plan")


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would make a process believe that a launcher started it."""
    told = {name for at in _LAUNCHERS for name in (at.rank, at.size)}
    return {name: value for name, value in os.environ.items() if name not in told} | more


def shardroute(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardroute.executors", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env or environment())


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place(3, 8, "", 1)),
        (SRUN, Place(5, 16, "tcp://gpu07:20000", 2)),
        (SRUN | {"SLURM_JOB_ID": "1234567"}, Place(5, 16, "tcp://gpu07:24567", 2)),
        (OPEN_MPI, Place(2, 8, "", 0)),
        (SRUN | TORCHRUN, Place(3, 8, "", 1)),
        ({}, None),
    ],
    ids=["torchrun", "srun", "srun of a job", "Open MPI on two hosts", "torchrun inside srun", "no launcher"],
)
def test_a_process_learns_from_its_launcher_which_rank_it_is(variables: dict[str, str], place: Place | None) -> None:
    assert find_place(environment=variables) == place


def test_ranks_of_mpirun_on_one_host_meet_in_a_file_of_their_own() -> None:
    place = find_place(environment=HYDRA)

    assert place is not None
    assert (place.rank, place.size, place.local_rank) == (1, 4, 1)
    assert place.rendezvous.startswith("file:///")
    assert f"-{os.getppid()}-" in place.rendezvous


def test_ranks_meet_whether_mpirun_has_started_them_or_a_script_in_between() -> None:
    program = "from shardroute.executors.launching.launches import file_of_host; print(file_of_host())"
    script = '"$PYTHON" -c "$PROGRAM"; true'
    told = {**os.environ, **HYDRA, "PYTHON": sys.executable, "PROGRAM": program}

    straight = subprocess.check_output([sys.executable, "-c", program], env=told, text=True)
    in_between = subprocess.check_output(["sh", "-c", script], env=told, text=True)

    assert straight == in_between
    assert f"-{os.getpid()}-" in straight


def test_flags_win_over_the_launcher() -> None:
    place = find_place(rank=0, size=2, rendezvous="tcp://host:1", environment=TORCHRUN)

    assert place == Place(0, 2, "tcp://host:1", 1)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ({"rank": 1}, {}, "--world-size is missing"),
        ({"size": 2}, {}, "--rank is missing"),
        ({"rank": 2, "size": 2}, TORCHRUN, "rank 2 of 2: expected a rank from 0 to 1"),
        ({}, TORCHRUN | {"RANK": "first"}, "the environment says RANK='first'"),
        ({"rank": 0, "size": 2}, {}, "nowhere to meet: give --rendezvous"),
        ({"rendezvous": "file:///x"}, {}, "no --rank and --world-size"),
        ({"rank": 0, "size": 2, "rendezvous": "file:///missing/x"}, {}, "a folder that can be written to, /missing is none"),
        ({"rank": 0, "size": 2, "rendezvous": "tcp://host"}, {}, "expected tcp://HOST:PORT or file:///PATH"),
        ({"rank": 0, "size": 2, "rendezvous": "tcp://host:99999"}, {}, "expected tcp://HOST:PORT or file:///PATH"),
        ({}, SRUN | {"SLURM_STEP_NODELIST": "[1]"}, "names no host"),
    ],
)
def test_half_a_place_is_refused(arguments: dict[str, object], variables: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        find_place(**arguments, environment=variables)


@pytest.mark.parametrize(
    ("nodes", "host"), [("node[07-09,12],other3", "node07"), ("a-1,b-2", "a-1"), ("single", "single"), ("x[3]", "x3")]
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_transport_with_launched_ranks_asks_for_a_launcher_or_spawn(plan: str) -> None:
    pytest.importorskip("torch")

    found = shardroute("run", plan, "--transport", "gloo")

    assert (found.returncode, found.stdout) == (2, "")
    assert "--spawn starts all ranks of transport gloo here; else start this with torchrun, srun or mpirun" in found.stderr


def test_processes_refuse_to_be_launched_rank_by_rank() -> None:
    with pytest.raises(InputError, match=r"this is rank 0 of 6, but transport processes starts its ranks itself"):
        run_as_rank(rows_to_columns(), Place(0, 6, "file:///nowhere"), transport="processes")


def test_spawned_ranks_of_gloo_report_as_processes_do(plan: str) -> None:
    pytest.importorskip("torch")

    by_gloo, by_processes = (
        json.loads(shardroute("run", plan, "--json", *more).stdout) for more in (("-t", "gloo", "--spawn"), ())
    )

    same = ("digest", "verified", "n_bytes_copied", "peak_staging_bytes", "mismatches")
    assert {key: by_gloo[key] for key in same} == {key: by_processes[key] for key in same}
    assert by_gloo["verified"]["mismatches"] == 0


@pytest.mark.slow
def test_torchrun_starts_ranks_that_run_the_plan_and_the_first_reports(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan, timeline = tmp_path / "two.plan", tmp_path / "t.json"
    save_plan(relay_chain(2), plan)
    run = ["-m", "shardroute.executors", "run", str(plan), "--transport", "gloo", "--json", "-o", str(timeline)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *run]

    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment(OMP_NUM_THREADS="1")
    )

    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout)["verified"] == {"bytes": 2000, "mismatches": 0}
    assert timeline.exists()


def test_a_plan_that_would_write_two_elements_to_one_place_is_bad_input(tmp_path: Path) -> None:
    hand = HandPlan()
    twice = Fragments((2, 4), [1], [[0, 0]], [[2, 4]], [0], [0], [[0, 1]], [4])  # both rows in one place
    t = hand.tensor((2, 4), row_shards((2, 4), [0]), twice)
    hand.copy(hand.bundle((t, [(0, 2), (0, 4)])), 0, 1)
    save_plan(hand.build(2), tmp_path / "bad.plan")

    checked, ran = (shardroute(command, str(tmp_path / "bad.plan")) for command in ("check", "run"))

    assert checked.returncode == ran.returncode == 2
    assert checked.stderr == ran.stderr
    assert "puts two elements in one place" in ran.stderr


@pytest.mark.faults
def test_a_run_ends_in_one_line_at_ctrl_c_however_often_it_is_pressed(tmp_path: Path) -> None:
    save_plan(relay_chain(6, n_elements=100_000, n_chunks=20), tmp_path / "long.plan")  # so that it still runs when we press
    command = [sys.executable, "-m", "shardroute.executors", "run", str(tmp_path / "long.plan"), "--repeats", "10000"]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=hear_ctrl_c
    )

    descendants(program.pid, at_least=6)  # it may take long to load
    for _ in range(3):
        program.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, errors = program.communicate(timeout=60)

    assert (program.returncode, out, errors) == (130, "", "Aborted.\n")
