"""Forks the ranks of a transport with memory of their own, which compute attention in all plans of `attention_plans`.

`attention_ranks.py FOLDER TRANSPORT`: rank 0 leaves in FOLDER/found.json what each plan came to. Over doubles of CUDA,
streams call NumPy on the host (cuLaunchHostFunc), for torch has no such GPU.
"""

import ctypes
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from attention_plans import CASES, N_RANKS
from forked_ranks import fork_ranks

from shardroute.executors.attention import kernels
from shardroute.executors.attention.contents import Contents, contents_of
from shardroute.executors.attention.floats import HOST_DTYPES
from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.gpus.devices import Memory
from shardroute.executors.interpreting.computers import Computer
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import launched
from shardroute.executors.messages import messages
from shardroute.executors.messages.separate import compile_separate
from shardroute.executors.transports import libraries
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place

# Small windows and messages, so that places in windows are given again and rounds are cut into groups.
WINDOW_BYTES, messages.PACKED_BYTES = 2**16, 2**14
libraries.LIBRARIES = {**libraries.LIBRARIES, "torch-cpu": "torch_twin"}
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostComputing:
    """A Computing over the double of CUDA, whose device memory is the host's."""

    def __init__(self, programs: Programs, contents: Contents, rank: int, device: object) -> None:
        self._programs, self._contents, self._rank = programs, contents, rank
        self._kept: list[object] = []
        self._computer: Computer[np.ndarray] | None = None
        self._laid: object = None

    def put(self, step: int, memory: Memory, stream: int) -> None:
        if self._computer is None or self._laid != memory.layout:
            self._computer, self._laid = self._made(memory), memory.layout
        computer = self._computer
        if not computer.computes(step):
            return
        run = _HOST_FUNCTION(lambda _: computer.run(step))
        self._kept.append(run)
        code = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream), run, None)
        assert code == 0

    def _made(self, memory: Memory) -> "Computer[np.ndarray]":
        def view(owner, address, dtype, shape, strides):
            numbers = np.dtype(HOST_DTYPES[dtype])
            n_bytes = numbers.itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            data = (ctypes.c_uint8 * n_bytes).from_address(memory.at(address))
            return np.ndarray(shape, numbers, data, 0, strides)

        call = (self._programs.calls, self._contents.attention, self._contents.tensors, self._rank)
        return Computer(*call, view, kernels)


def run_cases(transport: str, place: Place) -> dict[str, object]:
    """All plans over one world, each run twice; what they came to, on rank 0."""
    world = load_library(transport).connect(place, Deadline.after(60))
    found: dict[str, object] = {}
    for name, make in CASES.items():
        plan = replace(make(), window_bytes=WINDOW_BYTES)
        contents, separate = contents_of(plan, Arithmetic.TORCH), compile_separate(plan)
        trials = launched.run_launched(
            world, separate.plan, separate.programs, separate.messages, n_trials=2, deadline=Deadline.after(60), contents=contents
        )
        if trials:
            found[name] = {
                "n_trials": len(trials),
                "n_bytes": sum(f.n_bytes for f in trials[0].findings),
                "n_wrong": sum(f.n_wrong + f.n_stray for trial in trials for f in trial.findings),
                "worst": max(trial.worst for trial in trials) / contents.tolerance,
            }
    world.close()
    return found


def main() -> None:
    """Fork all ranks and wait for them."""
    folder, transport = Path(sys.argv[1]), sys.argv[2]
    if transport != "torch-cpu":
        launched.TorchComputing, launched.tensors_of = HostComputing, lambda device: device
    load_library(transport).preload()
    if find_spec("torch") is not None:
        import_module("torch")  # once, not in every rank
    fork_ranks(N_RANKS, folder, lambda rank: run_cases(transport, Place(rank, N_RANKS, f"file://{folder}/rendezvous")))


if __name__ == "__main__":
    main()
