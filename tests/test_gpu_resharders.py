"""A Resharder whose tensors lie on GPUs, over doubles of the libraries."""

import json
from pathlib import Path

import pytest
from gpu_doubles import need, run_over_doubles

MAIN = Path(__file__).parent / "doubles" / "resharder_main.py"
N_RANKS = 4


@pytest.mark.parametrize("transport", ["nccl", "nccl-put", "nvshmem"])
def test_tensors_on_gpus_are_moved_as_they_are_by_graphs_too_and_late_ranks_are_named(transport: str, tmp_path: Path) -> None:
    need("cuda", "nvshmem" if transport == "nvshmem" else "nccl")

    done = run_over_doubles(str(MAIN), str(tmp_path), transport, str(N_RANKS), FAKECUDA_JITTER_US="200", FAKENVSHMEM_DOMAIN="2")

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    assert all(isinstance(found, dict) for found in told), (told, done.stderr[-2000:])
    for rank, found in enumerate(told):
        assert found["right"] == [True] * 6
        assert found["graphs"] == "" if transport == "nccl" else "can't replay a CUDA graph: a replay would" in found["graphs"]
        assert f"rank {rank}: 1 tensors lie on the CPU and 1 on a GPU" in found["refused"]
        assert rank == 0 or "waiting for rank 0" in found["late"]
