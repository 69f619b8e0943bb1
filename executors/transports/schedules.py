"""What one rank does in which group: when its actions begin, what it sends and receives, and which rows it copies to itself.

Rule: worked out once, from columns that all ranks have; nothing here is put on a stream.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.messages.rounds import Groups
from shardroute.executors.transports.summing import LibrarySums


class Schedule:
    """One rank's part in each group; `numbers` are the groups that it takes part in, ascending, and `wire` the wire of each."""

    def __init__(self, programs: Programs, messages: Messages, groups: Groups, rank: int) -> None:
        actions = programs.actions
        self.actions = list(range(int(actions.ptr[rank]), int(actions.ptr[rank + 1])))
        self.queue_of = {action: int(actions.queue[action]) for action in self.actions}
        self.queues = sorted(set(self.queue_of.values()))
        action_of = {int(actions.step[action]): action for action in self.actions}
        self.begins: dict[int, list[int]] = defaultdict(list)
        self.sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.receives: dict[int, list[int]] = defaultdict(list)
        self.into_of: dict[int, list[int]] = defaultdict(list)
        self.before: dict[int, int] = {}
        last: dict[int, int] = {}
        for action in self.actions:
            step, queue = int(actions.step[action]), self.queue_of[action]
            self.begins[int(groups.first_of_step[step])].append(action)
            if queue in last:
                self.before[action] = last[queue]
            last[queue] = step
        for message in messages.out[messages.out_ptr[rank] : messages.out_ptr[rank + 1]].tolist():
            self.sends[int(groups.of_message[message])].append((message, action_of[int(messages.step[message])]))
        for message in messages.into[messages.in_ptr[rank] : messages.in_ptr[rank + 1]].tolist():
            self.receives[int(groups.of_message[message])].append(message)
            self.into_of[int(messages.step[message])].append(message)
        self.numbers = sorted({*self.begins, *self.sends, *self.receives})
        self.wire = groups.wire[self.numbers].tolist() if self.numbers else []
        self._number_of = {group: number for number, group in enumerate(self.numbers)}
        self.local = {action: local_rows(programs, action, rank) for action in self.actions}
        self.peers_of: dict[int, list[int]] = {}
        self.first_step: dict[int, int] = {}
        self.sent_steps: dict[int, set[int]] = {}
        self.scattered_steps: dict[int, set[int]] = {}
        for group in self.numbers:
            out = [message for message, _ in self.sends[group]]
            into = self.receives[group]
            self.peers_of[group] = sorted({*messages.dst[out].tolist(), *messages.src[into].tolist()})
            steps = [*messages.step[out].tolist(), *messages.step[into].tolist()]
            self.first_step[group] = min([*steps, *(int(actions.step[action]) for action in self.begins[group])])
            self.sent_steps[group] = set(steps)
            packed = [message for message in into if groups.in_at[message] != NO_ROWS]
            self.scattered_steps[group] = set(messages.step[packed].tolist())
        self.peers = sorted({peer for peers in self.peers_of.values() for peer in peers})
        self.exchanged: set[int] = {step for steps in self.sent_steps.values() for step in steps}  # with other ranks

    def expect_sums(self, group: int, step: int, sums: LibrarySums) -> None:
        """Know that a step is added up with a group, if it is."""
        if step in sums:
            self.sent_steps[group].add(step)
            self.exchanged.add(step)
            self.peers_of[group] = sorted({*self.peers_of[group], *sums.peers(step)})
            self.peers = sorted({*self.peers, *sums.peers(step)})

    def numbers_of(self, groups: Sequence[int]) -> list[int]:
        """The numbers here of groups that the rank takes part in."""
        return [self._number_of[group] for group in groups]


def local_rows(programs: Programs, action: int, rank: int) -> list[tuple[int, int]]:
    """The runs of an action's rows that stay on its rank; none of what a library adds up with other ranks'."""
    first, last = int(programs.actions.block_ptr[action]), int(programs.actions.block_ptr[action + 1])
    step = int(programs.actions.step[action])
    adds = (programs.blocks.sums[first:last] > 0) & bool(programs.cells.ptr[step + 1] - programs.cells.ptr[step] > 1)
    here = np.flatnonzero((programs.blocks.to[first:last] == rank) & ~adds) + first
    if not len(here):
        return []
    cuts = np.flatnonzero(np.diff(here) != 1) + 1
    return [(int(rows[0]), int(rows[-1]) + 1) for rows in np.split(here, cuts)]
