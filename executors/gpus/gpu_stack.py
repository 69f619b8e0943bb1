"""What of NVIDIA's stack can be used here, and why not.

Rule: nothing here initialises CUDA. Ranks are forked from a process that has asked, and CUDA doesn't survive a fork.
"""

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from shardroute.executors.reasons import first_line

# The wheels of both CUDA versions write the same files (nvidia/nccl/lib/libnccl.so.2, nvidia/nvshmem/lib/...), so whichever was
# installed last is there, whatever pip lists.
_SAME_FILES = ("nvidia-nccl", "nvidia-nvshmem", "nvshmem4py")
_PUT_VERSION = (2, 29, 2)  # the first NCCL with ncclPutSignal, ncclSignal and ncclWaitSignal


@dataclass(frozen=True, slots=True)
class Library:
    """A package as it was found: the version of the library that it loads, "" where none was; else why it can't be used."""

    package: str
    version: str
    reason: str = ""


def why_no_driver() -> str | None:
    """Why there is no GPU driver, None if there is one; says nothing of GPUs."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed (pip install 'shardroute[cu12]' or 'shardroute[cu13]')"
    found = driver_version()
    if found is None:
        return "no NVIDIA driver: libcuda.so.1 can't be loaded"
    wheels = mixed_wheels()
    if wheels:
        return (
            f"{' and '.join(wheels)} are both installed and write the same files; uninstall both, then install those of one CUDA "
            "version"
        )
    bindings = importlib.metadata.version("cuda-bindings")
    if found[0] < int(bindings.split(".")[0]):
        return f"the driver is for CUDA {found[0]}.{found[1]}, cuda-bindings {bindings} needs a newer one"
    return None


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver supports, None where there is no driver. Initialises nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def mixed_wheels() -> Sequence[str]:
    """The first pair of wheels for two CUDA versions that lie over each other, if there is one."""
    names = {(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
    for stem in _SAME_FILES:
        pair = [f"{stem}-{cuda}" for cuda in ("cu12", "cu13")]
        if names.issuperset(pair):
            return pair
    return ()


def nccl_version() -> tuple[int, int, int]:
    """The version of the NCCL library that nccl4py loads. Raises ImportError or RuntimeError where it loads none."""
    from nccl.bindings import nccl

    code = int(nccl.get_version())
    return code // 10000, code % 10000 // 100, code % 100


def nccl_has(*functions: str) -> bool:
    """Whether the NCCL library that nccl4py has loaded has these functions, by their names in C."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # by its SONAME, which finds what is loaded
    except OSError:
        return False
    return all(hasattr(library, name) for name in functions)


def why_no_nccl() -> str | None:
    """Why NCCL can't be used by nccl4py, None if it can."""
    if importlib.util.find_spec("nccl") is None:
        return "nccl4py is not installed (pip install 'shardroute[cu12]' or 'shardroute[cu13]')"
    reason = why_no_driver()
    if reason is not None:
        return reason
    try:
        nccl_version()
    except Exception as error:  # nccl4py raises what its loader does: of ImportError, RuntimeError and kinds of its own
        return f"nccl4py finds no NCCL library ({first_line(error)})"
    return None


def why_no_put() -> str | None:
    """Why NCCL's put and signal can't be used, as far as its version says; None if they can."""
    reason = why_no_nccl()
    if reason is not None:
        return reason
    version = nccl_version()
    if version < _PUT_VERSION:
        return f"NCCL {_text(version)} has no put and signal, which came with {_text(_PUT_VERSION)}"
    driver = driver_version()
    assert driver is not None
    if driver < (12, 5):  # of the copy-engine path that puts take; facts of NCCL's sources, 2.30.7
        return f"NCCL's puts need a driver for CUDA 12.5, this one is for {driver[0]}.{driver[1]}"
    return None


def why_no_nvshmem() -> str | None:
    """Why NVSHMEM can't be used by nvshmem4py, None if it can."""
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed (pip install 'shardroute[cu12]' or 'shardroute[cu13]')"
    reason = why_no_driver()
    if reason is not None:
        return reason
    try:
        nvshmem_version()
    except Exception as error:  # as above
        return f"nvshmem4py finds no NVSHMEM library ({first_line(error)})"
    return None


def nvshmem_version() -> tuple[int, int, int]:
    """The version of the NVSHMEM library that nvshmem4py loads. Raises ImportError or RuntimeError where it loads none."""
    from nvshmem.bindings import nvshmem

    parts = [ctypes.c_int() for _ in range(3)]
    nvshmem.vendor_get_version_info(*(ctypes.addressof(part) for part in parts))
    major, minor, patch = (part.value for part in parts)
    return major, minor, patch


def find_libraries() -> Sequence[Library]:
    """What a report says of this machine: driver, NCCL, NVSHMEM, torch."""
    driver = driver_version()
    found = [Library("driver", f"CUDA {driver[0]}.{driver[1]}" if driver else "", why_no_driver() or "")]
    for package, why, version in (("nccl4py", why_no_nccl, nccl_version), ("nvshmem4py", why_no_nvshmem, nvshmem_version)):
        reason = why()
        found.append(Library(package, "" if reason else _text(version()), reason or ""))
    try:
        found.append(Library("torch", importlib.metadata.version("torch")))
    except importlib.metadata.PackageNotFoundError:
        found.append(Library("torch", "", "not installed"))
    return found


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
