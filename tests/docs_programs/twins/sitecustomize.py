"""Lets `torch-nccl` run where torch has no CUDA: its twin for CPU tensors (tests/doubles) takes its place, where torch computes.

Python imports this module when it starts, so every rank has the twin, whatever starts it. What isn't a part of shardroute is left
alone.
"""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def use_twin(libraries: ModuleType) -> None:
    libraries.LIBRARIES = {**libraries.LIBRARIES, "torch-nccl": "torch_twin"}


def compute_on_cpus(on_streams: ModuleType) -> None:
    on_streams.why_no_attention = lambda: None


CHANGED = {"shardroute.executors.transports.libraries": use_twin, "shardroute.executors.attention.on_streams": compute_on_cpus}


class Changing(Loader):
    """Loads a module, then changes it."""

    def __init__(self, real: Loader, change: Callable[[ModuleType], None]) -> None:
        self._real, self._change = real, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._change(module)


class Finder(MetaPathFinder):
    """Finds what is to be changed, each module once."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        change = CHANGED.pop(name, None)
        if change is None:
            return None
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = Changing(spec.loader, change)
        return spec


sys.meta_path.insert(0, Finder())
