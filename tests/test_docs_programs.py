"""The programs that stand in for a cluster's where documents are run: they do what the real ones do, and refuse all else."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "docs_programs"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_task_of_srun_finds_its_place_among_all_and_on_its_node() -> None:
    said = 'echo "$SLURM_PROCID of $SLURM_NTASKS, $SLURM_LOCALID on $SLURM_NODEID, $SLURM_STEP_NODELIST"'

    ran = run("srun", "--nodes", "2", "--ntasks-per-node", "2", "--gpus-per-node", "8", "sh", "-c", said)

    places = ["0 of 4, 0 on 0", "1 of 4, 1 on 0", "2 of 4, 0 on 1", "3 of 4, 1 on 1"]
    assert sorted(ran.stdout.splitlines()) == [f"{place}, localhost" for place in places]
    assert ran.returncode == 0


def test_srun_ends_with_the_largest_code_of_its_tasks() -> None:
    assert run("srun", "-n", "3", "sh", "-c", "exit $SLURM_PROCID").returncode == 2


def test_tasks_of_shardroute_are_processes_of_their_own_with_its_codes() -> None:
    ran = run("srun", "-n", "2", "shardroute", "show", "none.plan")

    assert ran.returncode == 2
    assert ran.stderr.count("none.plan") >= 2
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("srun", ["--mpi", "pmix", "true"]), ("srun", ["-n", "2"]), ("nvidia_smi", ["-q"]), ("sendrecv_perf", ["-b", "8"])],
)
def test_what_has_no_record_is_refused(program: str, arguments: list[str]) -> None:
    ran = run(program, *arguments)

    assert (ran.returncode, ran.stdout) == (2, "")


def test_nvidia_smi_prints_the_sample_in_its_two_parts(repo: Path) -> None:
    parts = [run("nvidia_smi", *asked).stdout for asked in (["topo", "-m"], ["-L"])]

    assert "".join(parts) == (repo / "examples" / "topo.txt").read_text()


def test_only_the_first_task_of_sendrecv_perf_prints_the_log(repo: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "sendrecv_perf.py"), "-b", "1K", "-e", "1G", "-f", "2", "-g", "1"]

    ran = run("srun", "-n", "3", *command)

    assert ran.stdout == (repo / "examples" / "logs" / "sendrecv_perf.txt").read_text()
