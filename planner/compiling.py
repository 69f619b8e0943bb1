"""Compiles a kernel module's functions with Numba where it is installed; without it they run as they are, with the same results.

What takes seconds, once for an installation, is logged to COMPILINGS before it begins.

Rule: Numba is imported here and nowhere else, and not before a kernel is first asked for.
"""

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

COMPILINGS: Final = logging.getLogger("shardroute.compilings")
# Seconds to compile a line of a kernel (2 cores of a Xeon, 2026-12-01): 13.5 s for the 860 of the simulator's, 8.8 s for the 570
# of the planner's.
_LINE_S: Final = 0.0155
_NOTED_S: Final = 1.0  # what takes less isn't worth a word


def compiled(kernel: ModuleType) -> ModuleType:
    """A copy of the module whose functions Numba compiles at their first call, or loads from its cache; without Numba the module.

    The module names these functions in its FUNCTIONS.
    """
    return _compiled(kernel.__name__, tuple(kernel.FUNCTIONS)) or kernel


@cache
def _compiled(name: str, functions: Sequence[str]) -> ModuleType | None:
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for function_name in functions:
        function = getattr(module, function_name)
        try:
            jitted = numba.njit(cache=True)(function)
        except RuntimeError:  # neither this folder, NUMBA_CACHE_DIR nor the user's cache can be written
            jitted = numba.njit(function)
        if jitted is function:  # NUMBA_DISABLE_JIT is set
            return None
        setattr(module, function_name, jitted)
    assert spec.origin is not None
    takes_s = _LINE_S * len(Path(spec.origin).read_bytes().splitlines())
    if takes_s >= _NOTED_S and not _are_cached(module, functions):
        short = ".".join(name.split(".")[-2:])
        COMPILINGS.info("compiling %s, once for this installation: some %.0f s", short, takes_s)
    return module


def _are_cached(module: ModuleType, functions: Sequence[str]) -> bool:
    """Whether Numba has compiled any of the functions since their file was changed."""
    assert module.__file__ is not None
    changed_s = Path(module.__file__).stat().st_mtime
    folders = {name: getattr(module, name).stats.cache_path for name in functions}
    found = [index for name, folder in folders.items() if folder for index in Path(folder).glob(f"*.{name}-*.nbi")]
    return any(index.stat().st_mtime >= changed_s for index in found)
