"""The transport `torch-nccl`: NCCL by torch.distributed, the GPU transport that needs nothing beside a CUDA build of torch.

Grouped sends and receives (`batch_isend_irecv`), see `grouped`. The ranks find each other as those of `gloo` do, and compare
digests over it; the NCCL group is made beside it.
"""

import importlib.util
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.areas import Areas
from shardroute.executors.gpus.devices import Box, along
from shardroute.executors.gpus.local_devices import local_device
from shardroute.executors.interpreting.adding import CODES
from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.library_sums import Shape, Summation
from shardroute.executors.messages.messages import Messages
from shardroute.executors.reasons import first_line
from shardroute.executors.transports import gloo
from shardroute.executors.transports.grouped import GroupedTransport, Part
from shardroute.executors.transports.numbers import NumberedWire, Numbers
from shardroute.executors.transports.roll_calls import RollCall
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.executors.transports.summing import Sum
from shardroute.planner.wires import MOST_CHANNELS, channels_of
from shardroute.topologies.errors import InputError, RunError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Kind = Literal["cuda", "cpu"]
Groups = dict[tuple[int, int], "dist.ProcessGroup | None"]  # by the place of a wire in its plan, and its channels
_DTYPES = {CODES["f16"]: "float16", CODES["f32"]: "float32", CODES["f64"]: "float64", CODES["bf16"]: "bfloat16"}  # torch's names

listen, preload = gloo.listen, gloo.preload


def missing() -> str | None:
    """Why torch can't use NCCL here. Imports torch, which tells by its build."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install torch, a build for CUDA)"
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build for the CUDA version of the driver"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if not torch.cuda.is_available():
        return "torch finds no GPU (torch.cuda.is_available() is false): no driver, or one that is too old for its CUDA"
    return None


def connect(place: Place, deadline: Deadline) -> "TorchWorld":
    """Join the ranks as `gloo` does, then make the NCCL group. Raises as that does, and InputError for want of GPUs."""
    return over(gloo.connect(place, deadline), deadline, "cuda")


def join(group: object) -> "TorchWorld | None":
    """All ranks of torch.distributed, which must be initialised; a group of the caller's may name them."""
    control = gloo.join(None)
    if control is not None and group is not None:
        raise InputError("transport torch-nccl makes groups of its own over all ranks; leave out the group")
    return None if control is None else over(control, Deadline.after(_JOIN_S), "cuda")


_JOIN_S = 300.0  # to make a group when the caller has set no deadline


def over(control: gloo.GlooWorld, deadline: Deadline, kind: Kind) -> "TorchWorld":
    """A world that moves bytes between tensors on GPUs over NCCL, or, as its twin for tests, between CPU tensors over gloo."""
    import torch

    ordinal = 0
    if kind == "cuda":
        ids = [str(torch.cuda.get_device_properties(k).uuid) for k in range(torch.cuda.device_count())]
        ordinal = local_device(control, ids, deadline)
        torch.cuda.set_device(ordinal)
    device = torch.device(kind, ordinal) if kind == "cuda" else torch.device("cpu")
    return TorchWorld(control, TorchDevice(device), new_group(device, MOST_CHANNELS, deadline.left_s))


def new_group(device: "torch.device", channels: int, within_s: float) -> "dist.ProcessGroup | None":
    """A group of all ranks, connected: NCCL's with at most so many channels, or gloo's for a CPU. All ranks call it."""
    import torch
    import torch.distributed as dist

    options = None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = channels
    backend = "gloo" if options is None else "nccl"
    timeout = timedelta(seconds=max(within_s, 1.0))
    group: dist.ProcessGroup | None = dist.new_group(backend=backend, timeout=timeout, pg_options=options)
    # All ranks of a group must take part in what connects them, and not every rank sends in a plan's first round.
    first = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert first is not None
    first.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return group


class TorchWorld:
    """The ranks of a gloo group, with further groups for what moves."""

    def __init__(self, control: gloo.GlooWorld, device: "TorchDevice", group: "dist.ProcessGroup | None") -> None:
        self._control, self.device = control, device
        self.groups: Groups = {(0, MOST_CHANNELS): group}
        self.rank, self.size, self.key = control.rank, control.size, control.key
        self._areas = Areas(device)
        self._numbers = Numbers(range(self.size))
        self._calls: RollCall[dist.Work] | None = None  # by other numbers than those of `control`

    def rename(self, numbers: Sequence[int]) -> None:
        """Call rank i numbers[i], in plans that are opened and in errors from now on."""
        self._numbers = Numbers(numbers)
        wire = NumberedWire(self._control.wire, self._numbers)
        self._calls = RollCall(wire, numbers[self.rank], numbers, self._control.call_tag)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        if self._calls is None:
            return self._control.exchange(payload, deadline)
        return self._calls.gather(payload, self._calls.lengths(len(payload), deadline), deadline)

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> GroupedTransport:
        whole = self._numbers.are_in(programs.n_ranks)
        pairs = TorchPairs(self.groups, self.device, deadline, self._numbers, whole=whole)
        return GroupedTransport(
            self.device, pairs, self._line_up, programs, messages, arena, self._numbers.of[self.rank], deadline, self._areas
        )

    def close(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():  # its user has left torch.distributed, and this group with it
            return
        for group in self.groups.values():
            dist.destroy_process_group(group)
        self._control.close()

    def abandon(self) -> None:
        """Nothing: connections end with the process, and that is what the others see."""

    def _line_up(self, deadline: Deadline) -> None:
        self.exchange(b"", deadline)


class TorchPairs:
    """Groups by torch.distributed: each wire has one of the world's, which are made where they are missing. Where some ranks have
    no part in the plan (not `whole`) none can be made, and all wires share the first.
    """

    def __init__(
        self, groups: Groups, device: "TorchDevice", deadline: Deadline, numbers: Numbers, *, whole: bool = True
    ) -> None:
        self._groups, self._device, self._deadline, self._numbers = groups, device, deadline, numbers
        self._is_whole = whole
        self._wires: list[dist.ProcessGroup | None] = []
        self._sets: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def connect(self, wires: Sequence[int]) -> None:
        if not self._is_whole:
            self._wires = [self._groups[0, MOST_CHANNELS]] * len(wires)
            return
        for key in enumerate(channels_of(wires, self._device.n_sms)):
            if key not in self._groups:
                self._groups[key] = new_group(self._device.torch_device, key[1], self._deadline.left_s)
            self._wires.append(self._groups[key])

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], wire: int, stream: int) -> None:
        import torch.distributed as dist

        tensors = self._device
        # Receives first: with one peer, gloo takes twice as long for the other order (see `gloo`). NCCL doesn't care.
        parts = [
            dist.P2POp(way, tensors.view(pointer, n_bytes), group=self._wires[wire], group_peer=self._numbers.at(peer))
            for way, given in ((dist.irecv, receives), (dist.isend, sends))
            for pointer, n_bytes, peer in given
        ]
        with tensors.on(stream):
            try:
                for work in dist.batch_isend_irecv(parts):
                    if tensors.is_host:
                        work.wait(timedelta(seconds=self._deadline.limit_s))
                    else:
                        work.wait()  # which makes the stream wait, not the host
            except RuntimeError as error:
                raise RunError(f"torch.distributed failed: {first_line(error)}") from error

    def why_not(self, sums: Sequence[Summation]) -> str | None:
        """Why torch can't make these calls: its reduction to one rank may write to the others' addends."""
        if any(each.shape is Shape.ROOT for each in sums):
            return "torch scatters sums in equal parts that lie in one run, and these don't (transport nccl takes them)"
        return None

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        import torch.distributed as dist

        backend = "gloo" if self._device.is_host else "nccl"
        for members in ranks:
            self._sets[members] = dist.new_group(list(self._numbers.all_at(members)), backend=backend)

    def add_up(self, sums: Sequence[Sum], stream: int) -> None:
        import torch
        import torch.distributed as dist

        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name from torch 2.13 on
        tensors = self._device
        with tensors.on(stream):
            try:
                for each in sums:
                    dtype, group = getattr(torch, _DTYPES[each.code]), self._sets[each.ranks]
                    n_brought = each.n_bytes * (len(each.ranks) if each.shape is Shape.SCATTER else 1)
                    brought, gets = (
                        tensors.view(*part).view(dtype) for part in ((each.src, n_brought), (each.dst, each.n_bytes))
                    )
                    if each.shape is Shape.SCATTER:
                        scatter(gets, brought, group=group)
                    else:
                        gets.copy_(brought, non_blocking=True)
                        dist.all_reduce(gets, group=group)
            except RuntimeError as error:
                raise RunError(f"torch.distributed failed: {first_line(error)}") from error

    def check(self) -> None:
        """Nothing: torch raises, or its watchdog ends the process, when NCCL fails."""

    def abandon(self) -> None:
        """Nothing that a torch group can still do in time; the process ends."""


class TorchDevice:
    """A Device by torch: a GPU, or the CPU, on which everything is done when it is asked for."""

    def __init__(self, device: "torch.device") -> None:
        self.torch_device = device
        self.is_host = device.type == "cpu"
        self._memories: dict[int, torch.Tensor] = {}  # by pointer
        self._lent: dict[int, torch.Tensor] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event | float] = []

    @property
    def name(self) -> str:
        import torch

        return "the CPU, by torch" if self.is_host else torch.cuda.get_device_name(self.torch_device)

    @property
    def n_sms(self) -> int:
        """Of the GPU; of a CPU, which has none, as many as give every wire all channels that it may have."""
        import torch

        return sys.maxsize if self.is_host else torch.cuda.get_device_properties(self.torch_device).multi_processor_count

    def use(self) -> None:
        import torch

        if not self.is_host:
            torch.cuda.set_device(self.torch_device)

    def allocate(self, n_bytes: int) -> int:
        import torch

        try:
            memory = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=self.torch_device)
        except RuntimeError as error:
            raise RunError(f"torch can't allocate {n_bytes} bytes: {first_line(error)}") from error
        self._memories[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, pointer: int) -> None:
        del self._memories[pointer]

    def adopt(self, lent: Sequence[Lent]) -> None:
        import torch

        self._lent = {}
        for each in lent:
            if not isinstance(each.owner, torch.Tensor):
                raise InputError(f"transport torch-nccl takes torch's tensors, found {type(each.owner).__name__}")
            self._lent[each.pointer] = each.owner.detach().view(-1).view(torch.uint8)

    def view(self, pointer: int, n_bytes: int) -> "torch.Tensor":
        """Bytes from a pointer, as a tensor."""
        memory, at = self._find(pointer)
        return memory[at : at + n_bytes]

    def stream(self) -> int:
        import torch

        if self.is_host:
            return 1 + len(self._streams)
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch's
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def on(self, stream: int) -> "torch.cuda.StreamContext":
        """A context in which torch puts its work on the stream."""
        import torch

        return torch.cuda.stream(self._streams.get(stream))  # None is no change, which is all that a CPU has

    def event(self) -> int:
        import torch

        made = 0.0 if self.is_host else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        self._events.append(made)
        return len(self._events) - 1

    def record(self, event: int, stream: int) -> None:
        found = self._events[event]
        if isinstance(found, float):
            self._events[event] = time.monotonic()
        else:
            found.record(self._streams[stream])

    def follow(self, stream: int, event: int) -> None:
        found = self._events[event]
        if not isinstance(found, float):
            self._streams[stream].wait_event(found)

    def is_done(self, event: int) -> bool:
        found = self._events[event]
        return isinstance(found, float) or bool(found.query())  # type: ignore[no-untyped-call]  # torch's

    def elapsed_s(self, first: int, last: int) -> float:
        a, b = self._events[first], self._events[last]
        if isinstance(a, float) or isinstance(b, float):
            assert isinstance(a, float)
            assert isinstance(b, float)
            return b - a
        return 1e-3 * float(a.elapsed_time(b))

    def copy(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        with self.on(stream):
            self.view(dst, n_bytes).copy_(self.view(src, n_bytes), non_blocking=True)

    def copy_box(self, dst: int, src: int, box: Box, stream: int) -> None:
        # torch has no negative strides; dims with one are loops, as are those that would need more dims than torch has.
        walked = [d for d in range(len(box.count)) if box.src_stride[d] >= 0 and box.dst_stride[d] >= 0]
        rest = [d for d in range(len(box.count)) if d not in walked]
        shape, a, b = ([x[d] for d in walked] for x in (box.count, box.src_stride, box.dst_stride))
        loops = along(*([x[d] for d in rest] for x in (box.count, box.src_stride, box.dst_stride)))
        with self.on(stream):
            for src_offset, dst_offset in loops:
                into = self._strided(dst + dst_offset, [*shape, box.run], [*b, 1])
                into.copy_(self._strided(src + src_offset, [*shape, box.run], [*a, 1]), non_blocking=True)

    def upload(self, dst: int, data: NDArray[np.uint8], stream: int) -> None:
        import torch

        with self.on(stream):
            self.view(dst, len(data)).copy_(torch.from_numpy(data), non_blocking=True)

    def download(self, data: NDArray[np.uint8], src: int, stream: int) -> None:
        import torch

        with self.on(stream):
            torch.from_numpy(data).copy_(self.view(src, len(data)), non_blocking=True)

    def _strided(self, pointer: int, shape: list[int], strides: list[int]) -> "torch.Tensor":
        memory, at = self._find(pointer)
        return memory.as_strided(shape, strides, memory.storage_offset() + at)

    def _find(self, pointer: int) -> "tuple[torch.Tensor, int]":
        for start, memory in (*self._memories.items(), *self._lent.items()):
            if start <= pointer < start + memory.numel():
                return memory, pointer - start
        raise AssertionError(f"no memory of this device at {pointer:#x}")
