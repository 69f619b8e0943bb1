import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_doubles import need, run_over_doubles

from shardroute.executors.gpus import gpu_stack
from shardroute.executors.transports.libraries import LIBRARIES, ON_GPUS, load_library
from shardroute.topologies.errors import InputError

TOOL = Path(__file__).parents[1] / "tools" / "gpu_check.py"
WHY = "from shardroute.executors.gpus import gpu_stack; print(gpu_stack.{}())"


def install(folder: Path, *names: str) -> None:
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_wheels_for_two_cuda_versions_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert gpu_stack.mixed_wheels() == ["nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"]


@pytest.mark.parametrize("name", sorted(ON_GPUS))
def test_a_gpu_transport_that_cannot_run_here_says_why(name: str) -> None:
    if gpu_stack.driver_version() is not None:
        pytest.skip("this machine has a GPU driver")

    reasons = "not installed|no NVIDIA driver|without CUDA|finds no GPU"
    with pytest.raises(InputError, match=f"transport {name} can't run here: .*({reasons})"):
        load_library(name)
    assert LIBRARIES.keys() >= ON_GPUS


def test_nccl_before_put_and_signal_is_refused_with_both_versions() -> None:
    need("cuda", "nccl")

    done = run_over_doubles("-c", WHY.format("why_no_put"), FAKENCCL_VERSION="22705")

    assert done.stdout.strip() == "NCCL 2.27.5 has no put and signal, which came with 2.29.2"


def test_a_driver_older_than_the_bindings_is_refused() -> None:
    need("cuda")

    done = run_over_doubles("-c", WHY.format("why_no_driver"), FAKECUDA_VERSION="11080")

    assert "the driver is for CUDA 11.8, cuda-bindings" in done.stdout


def test_more_ranks_than_gpus_are_refused_on_every_rank(tmp_path: Path) -> None:
    need("cuda", "nccl")
    main = Path(__file__).parent / "conformance" / "double_main.py"

    run_over_doubles(str(main), str(tmp_path), "nccl", "2", FAKECUDA_DEVICES="1")

    for rank in range(2):
        assert "has 2 ranks and 1 GPUs that rank 1 can use" in (tmp_path / f"{rank}.json").read_text()


def test_the_check_says_that_there_is_no_gpu_and_passes(tmp_path: Path) -> None:
    if gpu_stack.driver_version() is not None:
        pytest.skip("this machine has a GPU driver")

    done = subprocess.run([sys.executable, str(TOOL), "--out", str(tmp_path)], capture_output=True, text=True, timeout=60,
    check=False)

    assert done.returncode == 0
    assert "no GPU was checked: " in done.stdout
    assert "0 checked, 0 failed, 0 skipped" in done.stdout
    assert (tmp_path / "gpu_check.json").exists()


@pytest.mark.slow
def test_the_check_runs_all_its_parts_over_doubles(tmp_path: Path) -> None:
    need("cuda", "nccl", "nvshmem")

    done = run_over_doubles(
        str(TOOL), "--quick", "--machine", "dgx-h100", "--transports", "nccl,nvshmem", "--out", str(tmp_path),
        FAKECUDA_DEVICES="2"
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    for transport in ("nccl", "nvshmem"):
        assert (tmp_path / f"{transport}.toml").exists()
    assert "captured and replayed" in done.stdout
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    changes = {row["case"]: row["parts_s"] for row in rows if row["part"] == "changes" and row["transport"] == "nccl"}
    assert "shrunk communicator" in changes["1 of 2 ranks went"]
    assert "grown communicator" in changes["1 of 2 ranks came back"]
    assert "NVSHMEM is started once a process" in done.stdout
    assert "a replay would wait for" in done.stdout
