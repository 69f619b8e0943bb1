"""Every conformance test runs once a transport; one that can't run here is skipped, with its reason."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for conformance_plans, which ranks import too

from conformance_plans import CASES, N_RANKS  # noqa: E402  # needs the path

from shardroute.executors.launching.launches import _LAUNCHERS  # noqa: E402
from shardroute.executors.launching.mpiexec import find_mpiexec  # noqa: E402
from shardroute.executors.launching.ranks import PROCESSES  # noqa: E402
from shardroute.executors.run import TRANSPORTS, run_plan  # noqa: E402
from shardroute.executors.transports.libraries import MPI, ON_GPUS, load_library  # noqa: E402
from shardroute.planner.plan_files import save_plan  # noqa: E402
from shardroute.planner.plans import Plan  # noqa: E402
from shardroute.topologies.errors import InputError  # noqa: E402

Outcome = dict[str, object]


@pytest.fixture(params=TRANSPORTS, scope="session")
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport that can run here."""
    name: str = request.param
    if name in ON_GPUS:
        pytest.skip("one rank a GPU: tools/gpu_check.py runs these cases there, test_doubles.py over doubles")
    if name != PROCESSES:
        try:
            load_library(name)
        except InputError as error:
            pytest.skip(str(error))
    return name


@pytest.fixture(scope="session")
def outcome_of(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What a case came to over the transport. Ranks with memory of their own run all cases in turn over one world."""
    folder = tmp_path_factory.mktemp("cases")
    known: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if transport != PROCESSES and not known:
            (found, *others) = start_ranks(transport, N_RANKS, folder, cases=True)
            assert isinstance(found, dict), found
            assert all(isinstance(other, dict) for other in others), others
            known.update(found)
            known["two plans at once"] = {"refused": [other["two plans at once"]["refused"] for other in others]}
        elif name not in known:
            known[name] = _run_here(CASES[name]())
        return known[name]

    return outcome


def _run_here(plan: Plan) -> Outcome:
    result = run_plan(plan, timeout_s=60, repeats=3)
    return {
        "n_trials": len(result.trials_s),
        "n_bytes": result.verified.bytes,
        "n_wrong": result.verified.mismatches,
        "start_s": result.timeline.start_s.tolist(),
        "end_s": result.timeline.end_s.tolist(),
    }


def start_ranks(
    transport: str, n_ranks: int, folder: Path, *, cases: bool = False, timeout_s: float = 60.0, stall: int = -1
) -> list[object]:
    """Start launched ranks and give what each left; rank `stall` never comes."""
    request = {"transport": transport, "n_ranks": n_ranks, "cases": cases, "timeout_s": timeout_s, "stall": stall}
    (folder / "request.json").write_text(json.dumps(request))
    main = [sys.executable, str(HERE / "rank_main.py"), str(folder)]
    launcher = [find_mpiexec(), "-n", str(n_ranks)] if transport == MPI else []
    path = {"PYTHONPATH": ":".join(str(p) for p in (HERE, HERE.parent)), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, *main], check=False, timeout=150, capture_output=True, text=True, env=_environment() | path)
    files = [folder / f"{rank}.json" for rank in range(n_ranks)]
    return [json.loads(file.read_text()) if file.exists() else done.stderr[-2000:] for file in files]


def _environment() -> dict[str, str]:
    """Ours, without what would make a process believe that a launcher started it."""
    import os

    told = {name for at in _LAUNCHERS for name in (at.rank, at.size)}
    return {name: value for name, value in os.environ.items() if name not in told}


@pytest.fixture
def run_ranks(transport: str, tmp_path: Path) -> Callable[..., list[str]]:
    """Run rank r with plans[r], as launched ranks; what each raised, "" for nothing."""

    def run(plans: list[Plan], *, timeout_s: float = 60.0, stall: int = -1) -> list[str]:
        for rank, plan in enumerate(plans):
            save_plan(plan, tmp_path / f"{rank}.plan")
        return [str(found) for found in start_ranks(transport, len(plans), tmp_path, timeout_s=timeout_s, stall=stall)]

    return run
