"""Which actions of a rank may begin, as steps complete and queues become free. Pure; knows no bytes and no clock."""

from collections import deque
from collections.abc import Set

from shardroute.executors.interpreting.interpret import Programs


class Course:
    """The course of one run of a rank's program. An action may begin when the one before it in its queue has ended, and all
    steps that it waits for are complete; of these only those in `sees` count, which the rank drives or receives: whatever the
    others bring comes by a step that has waited for them.
    """

    def __init__(self, programs: Programs, rank: int, sees: Set[int]) -> None:
        actions = programs.actions
        first, last = int(actions.ptr[rank]), int(actions.ptr[rank + 1])
        self._step: dict[int, int] = dict(zip(range(first, last), actions.step[first:last].tolist(), strict=True))
        self._queue: dict[int, int] = dict(zip(range(first, last), actions.queue[first:last].tolist(), strict=True))
        self._line: dict[int, deque[int]] = {}
        for action, queue in self._queue.items():
            self._line.setdefault(queue, deque()).append(action)
        self._left: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}  # actions by the step that they wait for
        for action in range(first, last):
            waits = {
                *actions.wait[actions.wait_ptr[action] : actions.wait_ptr[action + 1]].tolist(),
                *actions.own[actions.own_ptr[action] : actions.own_ptr[action + 1]].tolist(),
            } & sees
            self._left[action] = len(waits)
            for step in waits:
                self._waiting.setdefault(step, []).append(action)
        self._done: set[int] = set()
        self._busy: set[int] = set()
        self._n_left = last - first

    @property
    def is_over(self) -> bool:
        """Whether all actions have ended."""
        return not self._n_left

    def startable(self) -> list[int]:
        """Actions that may begin now, at most one a queue, in plan order; they have begun by this."""
        found = [
            line[0] for queue, line in self._line.items() if line and queue not in self._busy and not self._left[line[0]]
        ]
        for action in found:
            self._busy.add(self._queue[action])
        return sorted(found, key=lambda action: self._step[action])

    def end(self, action: int) -> None:
        """The action's queue is free for the next one."""
        queue = self._queue[action]
        self._line[queue].popleft()
        self._busy.discard(queue)
        self._n_left -= 1

    def complete(self, step: int) -> None:
        """Whoever waits for the step need not any longer."""
        if step not in self._done:
            self._done.add(step)
            for action in self._waiting.pop(step, ()):
                self._left[action] -= 1

    def holding_up(self) -> list[int]:
        """Steps that actions next in their queues wait for, ascending: where a run that stands still stands."""
        heads = {line[0] for line in self._line.values() if line}
        return sorted(step for step, actions in self._waiting.items() if heads & set(actions))
