"""Test doubles of NVIDIA's libraries, compiled from tests/doubles, and processes that find them in place of the real ones."""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

HERE = Path(__file__).parent
# Of the conformance cases over doubles, whose windows are small: a piece that is larger than one, and how often a case runs.
LARGE_MIB, N_TRIALS = 2, 2
TAKES_SUMS = importlib.util.find_spec("torch") is not None  # checksums of pieces, which torch takes
# The doubles stand in for the libraries that these would bring, which are large.
_BINDINGS = "pip install --no-deps nccl4py==0.6.0 nvshmem4py-cu12==0.4.1 cuda-bindings==12.9.10 cuda-pathfinder==1.9.1"
INSTALL = {"torch": "pip install 'shardroute[torch]'", "cuda": _BINDINGS, "nccl": _BINDINGS, "nvshmem": _BINDINGS}
_SONAMES = {"cuda": "libcuda.so.1", "nccl": "libnccl.so.2", "nvshmem": "libnvshmem_host.so.3"}


@cache
def preloads() -> str:
    """What LD_PRELOAD must be; compiles the doubles once. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the doubles need Linux and a C compiler (cc)")
    folder = Path(mkdtemp(prefix="shardroute-doubles-"))
    for name, soname in _SONAMES.items():
        links = [] if name == "cuda" else [f"-L{folder}", f"-l:{_SONAMES['cuda']}"]
        command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{soname}", "-o", str(folder / soname)]
        subprocess.run([*command, str(HERE / "doubles" / f"{name}.c"), *links, "-ldl"], check=True, timeout=60)
    return ":".join(str(folder / soname) for soname in _SONAMES.values())


def need(*modules: str) -> None:
    """Skip the test where one of these can't be imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed ({INSTALL.get(module, f'pip install {module}')})")


def need_asked(request: pytest.FixtureRequest, in_gate: bool) -> None:
    """Skip a fault that the gate leaves out, unless faults were asked for."""
    if not in_gate and "faults" not in request.config.option.markexpr:
        pytest.skip("run by `pytest -m faults`")


def run_over_doubles(*arguments: str, timeout_s: float = 150, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the doubles loaded, and these environment variables."""
    path = os.pathsep.join(str(HERE / folder) for folder in ("", "conformance", "doubles"))
    environment = os.environ | {"PYTHONPATH": path, "LD_PRELOAD": preloads()} | variables
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
