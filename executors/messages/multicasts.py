"""Which messages of collective steps are one and the same for all their receivers, so that a library's broadcast can carry them.

Rule: computed alike on all ranks. A broadcast step is one such message, or a few; an all-gather is one from each rank that holds
a part, grouped, which is how parts of unlike sizes are gathered.
"""

from dataclasses import dataclass

import numpy as np

from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.messages.rounds import Groups


@dataclass(frozen=True, slots=True)
class Multicast:
    """Messages with one content from one rank: `messages` has one a receiver; `ranks`, ascending, are the sender and all
    receivers."""

    messages: tuple[int, ...]
    src: int
    ranks: tuple[int, ...]


def find_multicasts(programs: Programs, messages: Messages, groups: Groups) -> list[Multicast]:
    """In the order of steps. All messages that a rank sends in the step must come in the same parts to all receivers, where they
    lie without gaps, so that nothing is unpacked.
    """
    several = np.diff(programs.cells.ptr) > 1
    rows = np.flatnonzero(several[messages.step] & (messages.n_bytes > 0)) if len(messages.step) else np.zeros(0, np.int64)
    by_sender: dict[tuple[int, int], dict[int, list[int]]] = {}
    for message in rows.tolist():
        sender = int(messages.step[message]), int(messages.src[message])
        by_sender.setdefault(sender, {}).setdefault(int(messages.dst[message]), []).append(message)
    found = []
    for (_, src), by_receiver in by_sender.items():
        sets = list(zip(*by_receiver.values(), strict=False))
        alike = len(by_receiver) > 1 and len({len(parts) for parts in by_receiver.values()}) == 1
        if alike and all(_is_one(programs, messages, groups, each) for each in sets):
            ranks = tuple(sorted({src, *by_receiver}))
            found += [Multicast(each, src, ranks) for each in sets]
    return found


def _is_one(programs: Programs, messages: Messages, groups: Groups, each: tuple[int, ...]) -> bool:
    """Whether messages read the same bytes in the same order, and lie in order wherever they come."""
    of = list(each)
    if (messages.dst_at[of] == NO_ROWS).any() or len(np.unique(groups.of_message[of])) > 1:
        return False
    return len({_reads(programs, int(messages.first[m]), int(messages.last[m])) for m in of}) == 1


def _reads(programs: Programs, first: int, last: int) -> tuple[bytes, ...]:
    """What rows read, and in which order: their addresses, lengths and strides."""
    blocks, forms = programs.blocks, programs.forms
    form = blocks.form[first:last]
    strided = form[form >= 0]
    return (
        blocks.src[first:last].tobytes(), blocks.n_bytes[first:last].tobytes(), (form >= 0).tobytes(),
        forms.run[strided].tobytes(), forms.count[strided].tobytes(), forms.src_stride[strided].tobytes(),
    )  # fmt: skip
