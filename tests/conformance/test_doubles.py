"""The GPU transports over doubles of the libraries that they call: all conformance cases, some of them followed by checksums
too, on streams that run in any order that events allow. `torch-nccl` runs over gloo with CPU tensors.
"""

import json
from pathlib import Path

import conformance_plans
import pytest
from conformance_plans import CASES, N_RANKS
from gpu_doubles import LARGE_MIB, N_TRIALS, TAKES_SUMS, need, run_over_doubles
from rank_main import FOLLOWED

from shardroute.planner.plans import Plan

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

MAIN = Path(__file__).parent / "double_main.py"
TRANSPORTS = {
    "nccl": ("nccl", {}),
    "nccl-put": ("nccl-put", {}),
    "nvshmem in one domain": ("nvshmem", {}),
    "nvshmem in domains of 2": ("nvshmem", {"FAKENVSHMEM_DOMAIN": "2"}),
    "torch on CPUs": ("torch-cpu", {}),
}
NEEDS = {"nccl": ("cuda", "nccl"), "nccl-put": ("cuda", "nccl"), "nvshmem": ("cuda", "nvshmem"), "torch-cpu": ("torch",)}


def needed_bytes(plan: Plan) -> int:
    return sum(int(c.target.n_elements.sum()) * c.itemsize * len(c.members) for c in plan.problem.classes)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_byte_arrives_and_no_other_changes_in_every_run_of_every_case(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance_plans, "LARGE_MIB", LARGE_MIB)
    transport, variables = TRANSPORTS[name]
    need(*NEEDS[transport])

    done = run_over_doubles(str(MAIN), str(tmp_path), transport, str(N_RANKS), FAKECUDA_JITTER_US="200", **variables)

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    assert all(isinstance(found, dict) for found in told), (told, done.stderr[-2000:])
    found = told[0]
    refused = [each.pop("two plans at once")["refused"] for each in told]
    assert set(found) == set(CASES)
    for case, make in CASES.items():
        came = found[case]
        assert (case, came["n_trials"], came["n_bytes"], came["n_wrong"]) == (case, N_TRIALS, needed_bytes(make()), 0)
        assert came.get("n_accused", 0) == 0
    assert {case for case, came in found.items() if "n_accused" in came} == set(FOLLOWED if TAKES_SUMS else ())
    assert refused[0] == ""
    assert all("goes on over these ranks" in text for text in refused[1:])
