"""Checksums of pieces taken on a device, by torch, where the bytes lie: bit for bit those that `checksums` takes on the host.

Rule: only `collect` waits, and only checksums come to the host. At most _CHUNK_BYTES are summed at a time, so what this takes
beside the weights is a few times that, whatever the size of a piece.

torch's int64 wraps as words modulo 2^64 do. A chunk may begin and end within a word: with zeros in the place of the bytes that
other chunks have, its share is what its own bytes count, and shares add up.
"""

import importlib.util
from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np

from shardroute.executors.gpus.devices import Memory
from shardroute.executors.gpus.tensors import Tensors
from shardroute.executors.interpreting.blocks import LINEAR, Forms
from shardroute.executors.interpreting.checksums import multipliers
from shardroute.executors.interpreting.patterns import cut
from shardroute.executors.interpreting.piece_sums import PieceRows, Sums
from shardroute.topologies.errors import InputError

if TYPE_CHECKING:
    import torch

# Some five kernels a chunk: long enough that starting them is little of it (5 us each against 32 MiB at some TB/s).
_CHUNK_BYTES: Final = 32 * 2**20
_WORD_BYTES: Final = 8


def why_no_sums() -> str | None:
    """Why checksums can't be taken on this machine's GPUs, None if they can. Imports torch, which tells by its build."""
    if importlib.util.find_spec("torch") is None:
        return "checksums on GPUs are taken by torch, which isn't installed (pip install torch, a build for CUDA)"
    import torch

    if torch.version.cuda is None:
        return f"checksums on GPUs are taken by torch, and torch {torch.__version__} was built without CUDA"
    return None


def check_sums_on(device: object) -> None:
    """Raise InputError where torch can't take checksums on a device."""
    reason = None if getattr(device, "is_host", False) else why_no_sums()
    if reason is not None:
        raise InputError(f"{reason}; leave --verify (verify=True) out")


class DeviceSums(Sums):
    """The checksums of one rank whose memory lies on a device. All that is put on a stream returns at once."""

    def __init__(self, rows: PieceRows, forms: Forms, rank: int, device: Tensors) -> None:
        sent, kept = (np.zeros(len(rows.step), dtype=np.uint64) for _ in range(2))
        super().__init__(rows, rank, sent, kept)
        import torch  # noqa: F401  # now, not in a run that is measured

        self._rows, self._forms, self._device = rows, forms, device
        self._tables: _Tables | None = None

    def put_sent(self, step: int, memory: Memory, stream: int) -> None:
        """Take those of all that this rank sends in a step, of what lies there when the stream comes to it."""
        for row in self.sent_in(step):
            self._put(row, memory.at(int(self._rows.src[row])), row - self.mine.start, stream, sending=True)

    def put_kept(self, memory: Memory, stream: int) -> None:
        """Take those of all that has landed in this rank's destination weights."""
        n_sent = self.mine.stop - self.mine.start
        for place, row in enumerate(self.landing.tolist(), n_sent):
            self._put(row, memory.at(int(self._rows.dst[row])), place, stream, sending=False)

    def collect(self) -> None:
        """Bring what was taken to `sent` and `kept`, once the streams have passed."""
        if self._tables is None:  # nothing was put
            return
        found = self._tables.found.cpu().numpy().view(np.uint64)
        n_sent = self.mine.stop - self.mine.start
        self.sent[self.mine], self.kept[self.landing] = found[:n_sent], found[n_sent:]

    def _put(self, row: int, pointer: int, place: int, stream: int, *, sending: bool) -> None:
        if self._tables is None:  # not on the stream: bringing them there would wait for what it waits for
            self._tables = self._made(self._device.view(pointer, 1).device)
        with self._device.on(stream):
            self._take(self._tables, row, pointer, place, sending=sending)

    def _take(self, tables: "_Tables", row: int, pointer: int, place: int, *, sending: bool) -> None:
        shares, at = [], 0
        for chunk in self._chunks(row, pointer, sending=sending):
            shares += tables.shares(chunk, at)
            at += chunk.numel()
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        tables.found[place].copy_(total)

    def _made(self, device: "torch.device") -> "_Tables":
        n_sent = self.mine.stop - self.mine.start
        mine = np.concatenate([np.arange(self.mine.start, self.mine.stop), self.landing])
        return _Tables(int(self._rows.n_bytes[mine].max()), n_sent + len(self.landing), device)

    def _chunks(self, row: int, pointer: int, *, sending: bool) -> "Iterator[torch.Tensor]":
        """The bytes of a row in row-major order, in tensors of uint8 that lie without gaps."""
        import torch

        form, n_bytes = int(self._rows.form[row]), int(self._rows.n_bytes[row])
        if form == LINEAR:
            for start in range(0, n_bytes, _CHUNK_BYTES):
                yield self._device.view(pointer + start, min(_CHUNK_BYTES, n_bytes - start))
            return
        forms = self._forms
        run, count = int(forms.run[form]), forms.count[form].tolist()
        stride = (forms.src_stride if sending else forms.dst_stride)[form].tolist()
        dims = [d for d, n in enumerate(count) if n > 1]
        size = gcd(_WORD_BYTES, run, pointer, *(stride[d] for d in dims))
        shape, strides = (*(count[d] for d in dims), run // size), (*(stride[d] for d in dims), size)
        of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        for starts, extent in cut(shape, _CHUNK_BYTES // size):
            first = pointer + sum(i * s for i, s in zip(starts, strides, strict=True))
            reach = [(n - 1) * s for n, s in zip(extent, strides, strict=True)]
            lowest, span = first + sum(min(r, 0) for r in reach), size + sum(map(abs, reach))
            there = self._device.view(lowest, span).view(of).as_strided(extent, [abs(s) // size for s in strides])
            backwards = [d for d, s in enumerate(strides) if s < 0]  # torch has no negative strides
            part = there.flip(backwards) if backwards else there
            yield part.contiguous().view(-1).view(torch.uint8)


class _Tables:
    """Multipliers on a device, for pieces of up to so many bytes; `found` (int64[n]) is where checksums go."""

    def __init__(self, n_bytes: int, n: int, device: "torch.device") -> None:
        import torch

        words, tiles = multipliers(n_bytes)
        self._words, self._tiles = (torch.from_numpy(x.view(np.int64)).to(device) for x in (words, tiles))
        self.found = torch.empty(n, dtype=torch.int64, device=device)  # never filled: streams write it in any order

    def shares(self, chunk: "torch.Tensor", at: int) -> "list[torch.Tensor]":
        """What the bytes of a chunk that begins `at` bytes into its piece count: numbers to add up."""
        words, first = _as_words(chunk, at), at // _WORD_BYTES
        n_tile = len(self._words)
        tile, inside = divmod(first, n_tile)
        head = min(len(words), n_tile - inside) if inside else 0
        n_whole = (len(words) - head) // n_tile
        found = []
        if head:
            found.append((words[:head] * self._words[inside : inside + head]).sum() * self._tiles[tile])
            tile += 1
        if n_whole:
            body = words[head : head + n_whole * n_tile].view(n_whole, n_tile)
            found.append(((body * self._words).sum(1) * self._tiles[tile : tile + n_whole]).sum())
        rest = words[head + n_whole * n_tile :]
        if len(rest):
            found.append((rest * self._words[: len(rest)]).sum() * self._tiles[tile + n_whole])
        return found


def _as_words(chunk: "torch.Tensor", at: int) -> "torch.Tensor":
    """A chunk as int64, with zeros before and behind it where it begins or ends within a word."""
    import torch

    before, n = at % _WORD_BYTES, chunk.numel()
    behind = -(before + n) % _WORD_BYTES
    lies_in_words = chunk.data_ptr() % _WORD_BYTES == 0 and chunk.storage_offset() % _WORD_BYTES == 0
    if not before and not behind and lies_in_words:
        return chunk.view(torch.int64)
    padded = torch.zeros(before + n + behind, dtype=torch.uint8, device=chunk.device)
    padded[before : before + n] = chunk
    return padded.view(torch.int64)
