"""What a block of a document may need beside the core install: whether it is here, how to get it, and what stands in for it.

No machine that runs the gate has GPUs or a cluster. There a block runs over doubles of the libraries that drive GPUs
(tests/doubles), and with programs of tests/docs_programs first on PATH, which know what the documents ask of them.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_doubles import INSTALL, preloads

HERE = Path(__file__).resolve().parent
# As many as the largest run that a document shows has ranks.
N_GPUS = 32


@dataclass(frozen=True, slots=True)
class Need:
    """Whether it is here, and how to get it; the programs that stand in for others, by the modules that are run."""

    is_here: bool
    how: str
    programs: Mapping[str, str] = field(default_factory=dict)


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def on_path(program: str) -> bool:
    return shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) is not None


NEEDS: dict[str, Need] = {
    "torch": Need(has("torch"), "pip install 'shardroute[torch]'"),
    "jax": Need(has("jax"), "pip install 'shardroute[jax]'"),
    "mpi": Need(has("mpi4py") and on_path("mpirun"), "pip install 'shardroute[mpi]'"),
    "report": Need(has("vl_convert"), "pip install 'shardroute[report]'"),
    "parquet": Need(has("pyarrow"), "pip install 'shardroute[parquet]'"),
    "openssl": Need(on_path("openssl"), "install openssl"),
    "no-gpu": Need(not on_path("nvidia-smi"), "a machine without GPUs; with them it takes minutes"),
    "gpus": Need(
        sys.platform == "linux" and on_path("cc") and has("cuda", "nccl", "nvshmem"), f"cc, and {INSTALL['nccl']}",
        {"nvidia-smi": "nvidia_smi.py", "sendrecv_perf": "sendrecv_perf.py"},
    ),
    "slurm": Need(True, "nothing", {"srun": "srun.py"}),
}  # fmt: skip


def stand_ins(needs: Sequence[str], folder: Path) -> list[str]:
    """Folders to have first on PATH, made in `folder`, with the programs that stand in for what a block needs."""
    made = []
    for name in needs:
        for program, module in NEEDS[name].programs.items():
            path = folder / name / program
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "docs_programs" / module}" "$@"\n')
            path.chmod(0o755)
            made.append(str(path.parent))
    return made


def variables(needs: Sequence[str]) -> dict[str, str]:
    """What a block that needs these finds in its environment, beside its PATH."""
    if "gpus" not in needs:
        return {}
    modules = [HERE / "docs_programs" / "twins", HERE / "doubles"]
    return {"LD_PRELOAD": preloads(), "PYTHONPATH": os.pathsep.join(map(str, modules)), "FAKECUDA_DEVICES": str(N_GPUS)}
