"""Attention on the streams of GPU transports: over doubles of their libraries, and by torch on CPU tensors."""

import json
from pathlib import Path

import pytest
from attention_plans import CASES, N_RANKS
from gpu_doubles import need, run_over_doubles

MAIN = Path(__file__).parent / "attention_ranks.py"
NEEDS = {"nccl": ("cuda", "nccl"), "nccl-put": ("cuda", "nccl"), "nvshmem": ("cuda", "nvshmem"), "torch-cpu": ("torch",)}


@pytest.mark.slow
@pytest.mark.conformance
@pytest.mark.parametrize("transport", NEEDS)
def test_outputs_and_gradients_equal_one_devices_whatever_order_streams_run_in(transport: str, tmp_path: Path) -> None:
    need("torch", *NEEDS[transport])

    done = run_over_doubles(str(MAIN), str(tmp_path), transport, FAKECUDA_JITTER_US="200", FAKENVSHMEM_DOMAIN="2")

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    assert all(isinstance(found, dict) for found in told), (told, done.stderr[-2000:])
    assert set(told[0]) == set(CASES)
    for name, make in CASES.items():
        plan, found = make(), told[0][name]
        targets = zip(plan.problem.tensors, plan.problem.target.fragments, strict=True)
        n_bytes = sum(int(f.n_elements.sum()) * t.itemsize for t, f in targets)
        assert (name, found["n_trials"], found["n_bytes"], found["n_wrong"]) == (name, 2, n_bytes, 0)
        assert 0 < found["worst"] < 1
