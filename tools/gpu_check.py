"""The acceptance check for a machine with GPUs: one command, any number of GPUs from 1, under 8 minutes.

    python tools/gpu_check.py [--gpus N] [--machine NAME] [--transports nccl,nccl-put,nvshmem,torch-nccl] [--out FOLDER]

For each transport: ping-pongs, from which a calibration is made; the conformance cases; a small refit, by two strategies, and
once more as a CUDA graph; the traffic of ring attention; attention itself, by torch. Bytes and numbers are verified,
predictions stand beside measurements. FOLDER gets gpu_check.json and a calibration a transport. What can't run is skipped with
its reason. Exits 0 when nothing failed, also without a GPU, and 1 else.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardroute.executors.gpus.gpu_stack import find_libraries, why_no_driver
from shardroute.executors.transports.libraries import load_library
from shardroute.planner.cli.output import progress
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_seconds

HERE = Path(__file__).resolve().parent
TRANSPORTS: Final = ("nccl", "nccl-put", "nvshmem", "torch-nccl")
BUDGET_S: Final = 450.0  # of all transports together: under 8 minutes, with what it takes to start and to report
# The machine whose shape and shipped calibration fit a GPU, by what stands in its name; the first that does.
MACHINES: Final = (("GB200", "gb200-nvl72"), ("B200", "dgx-b200"), ("H200", "hgx-h200"), ("H100", "dgx-h100"))
_GRACE_S: Final = 10.0
_LOOK_S: Final = 0.2
_COUNT = (
    "from shardroute.executors.gpus.cuda import CudaDevice, count_devices\n"
    "n = count_devices()\n"
    "print(n, CudaDevice(0).name if n else '', sep='\\t')"
)

Row = dict[str, object]


def find_gpus() -> tuple[int, str, str]:
    """How many GPUs there are, the first one's name, and why there are none. A process of its own asks: CUDA doesn't fork."""
    reason = why_no_driver()
    if reason is not None:
        return 0, "", reason
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        return 0, "", (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    n, name = done.stdout.strip("\n").split("\t")
    return int(n), name, "" if int(n) else "the driver finds no GPU"


def machine_of(gpu: str) -> str:
    """The name of a shipped machine for a GPU's name, "" where none fits."""
    return next((machine for part, machine in MACHINES if part in gpu.upper()), "")


def environment(gpu: str, n_gpus: int) -> dict[str, object]:
    """What a reader must know to repeat this."""
    asked = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "NVSHMEM_", "CUDA_"))}
    return {
        "host": platform.node(), "python": platform.python_version(), "gpu": gpu, "n_gpus": n_gpus,
        "libraries": [
            {"package": found.package, "version": found.version, "reason": found.reason} for found in find_libraries()
        ],
        "variables": asked, "topology": _nvidia_smi("topo", "-m"), "gpus": _nvidia_smi("-L"),
    }  # fmt: skip


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False).stdout


def check_transport(transport: str, n_gpus: int, machine: str, out: Path, budget_s: float, size: str) -> list[Row]:
    """What all parts came to over one transport, each a row with `part` and one of `ok`, `skipped` and `failed`."""
    try:
        load_library(transport)
    except InputError as error:
        return [{"transport": transport, "part": "all", "skipped": str(error)}]
    folder = out / transport
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE / "gpu_ranks.py"), str(folder), transport]
    rest = [str(n_gpus), machine, f"{budget_s:g}", size]
    ranks = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(n_gpus)]
    limit_s = budget_s + _GRACE_S  # ranks report a passed deadline themselves
    began_s = time.monotonic()
    with progress(f"{transport} (the time left is the most that it may take)") as done:
        while any(rank.poll() is None for rank in ranks):
            past_s = time.monotonic() - began_s
            done(min(past_s / limit_s, 1.0))
            if past_s > limit_s:
                for rank in ranks:
                    rank.kill()
            time.sleep(_LOOK_S)
    found = folder / "found.jsonl"
    rows: list[Row] = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    for number, rank in enumerate(ranks):
        if rank.returncode:
            error_file = folder / f"{number}.error"
            words = error_file.read_text().strip().splitlines()[-1] if error_file.exists() else f"exit code {rank.returncode}"
            rows.append({"part": "all", "case": f"rank {number}", "failed": words})
    return [{"transport": transport} | row for row in rows]


def table_of(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    table = Table("transport", "part", "case", "result", "measured", "predicted", "error", "", box=None)
    for row in rows:
        measured, predicted = row.get("measured_s"), row.get("predicted_s")
        result = "failed" if is_failed(row) else "skipped" if "skipped" in row else "ok"
        table.add_row(
            str(row["transport"]), str(row["part"]), str(row.get("case", "")), result,
            format_seconds(measured) if isinstance(measured, float) else "",
            format_seconds(predicted) if isinstance(predicted, float) else "",
            f"{100 * (predicted / measured - 1):+.0f} %" if isinstance(measured, float) and isinstance(predicted, float) else "",
            escape(str(row.get("failed", row.get("skipped", row.get("text", ""))))),
        )  # fmt: skip
    return table


def is_failed(row: Row) -> bool:
    """Whether a row says that something is wrong."""
    return "failed" in row or row.get("ok") is False


def main() -> int:
    """Check all that can be checked here; the exit status."""
    parser = argparse.ArgumentParser(description="Check the GPU transports on this machine.")
    parser.add_argument("--gpus", type=int, help="use so many of them")
    parser.add_argument("--machine", help="the machine file or shipped machine to predict with; by the GPU's name if not given")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--quick", action="store_true", help="move little, to try this program; what it measures means nothing")
    given = parser.parse_args()
    n_gpus, gpu, reason = find_gpus()
    n_gpus = min(n_gpus, given.gpus) if given.gpus else n_gpus
    machine = given.machine or machine_of(gpu)
    began_s = time.monotonic()
    rows: list[Row] = []
    if n_gpus and not machine:
        reason = f"no shipped machine fits {gpu}; give --machine with one of yours"
    if not reason:
        left = given.transports.split(",")
        for k, transport in enumerate(left):
            share_s = (BUDGET_S - (time.monotonic() - began_s)) / (len(left) - k)
            rows += check_transport(transport, n_gpus, machine, given.out, share_s, "quick" if given.quick else "full")
    n_checked = sum("ok" in row or "failed" in row for row in rows)
    n_failed = sum(map(is_failed, rows))
    given.out.mkdir(parents=True, exist_ok=True)
    report = {
        "environment": environment(gpu, n_gpus), "machine": machine, "reason": reason, "n_checked": n_checked, "n_failed":
        n_failed,
        "seconds": time.monotonic() - began_s, "rows": rows,
    }  # fmt: skip
    (given.out / "gpu_check.json").write_text(json.dumps(report, indent=1))
    console = Console(width=None if sys.stdout.isatty() else 180)
    if rows:
        console.print(table_of(rows))
    if reason:
        console.print(f"no GPU was checked: {reason}", highlight=False, markup=False)
    n_skipped = sum("skipped" in row for row in rows)
    console.print(f"{n_checked} checked, {n_failed} failed, {n_skipped} skipped; {given.out / 'gpu_check.json'}", highlight=False)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
