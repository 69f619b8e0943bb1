"""Compiles a kernel module's functions with Numba where it is installed; without it they run as they are, with the same results.

Rule: Numba is imported here and nowhere else, and not before a kernel is first asked for.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from types import ModuleType


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
        setattr(module, function_name, jitted)
    return module
