"""The thread in which the transfers over a world's ranks run: one for all of them.

Rule: a thread lives as long as somebody holds its Worker. PyTorch 2.13 keeps 174 bytes of each thread that has ever sent or
received over gloo (tools/soak_torch.py measures it), so a thread a transfer would never stop growing.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    work: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Does what it is given in order, in a thread that starts with the first of it and ends once nobody holds the Worker.

    The thread is a daemon. An interpreter that ends waits for it, but not long: ended within a library it would take the
    process with it, and if it hangs it must not hold that up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: threading.Event | None = None
        weakref.finalize(self, self._tasks.put, None)

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Begin it once what was given before has ended; the event is set when it has ended. It must not raise."""
        task = _Task(work)
        self._last = task.done  # not the task, which holds the resharder, which holds this
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a fork leaves its child without the thread
                self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="shardroute", daemon=True)
                self._thread.start()
        self._tasks.put(task)
        return task.done


    def finish(self, timeout_s: float) -> None:
        """Wait until all that was given has ended, at most so long."""
        last = self._last
        if last is not None and self._thread is not None and self._thread.is_alive():
            last.wait(timeout_s)


def _serve(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        try:
            task.work()
        finally:
            task.done.set()
        del task  # it holds the resharder, which holds the Worker


# How long an interpreter that ends waits for a transfer.
_AT_EXIT_S: Final = 10.0
_lock: Final = threading.Lock()
_workers: Final[weakref.WeakValueDictionary[int, Worker]] = weakref.WeakValueDictionary()


def worker_of(key: int) -> Worker:
    """The Worker of worlds with this key, over which one plan moves at a time; the same one as long as somebody holds it."""
    with _lock:
        found = _workers.get(key)
        if found is None:
            found = _workers[key] = Worker()
        return found


def _finish_all() -> None:
    for worker in list(_workers.values()):
        worker.finish(_AT_EXIT_S)


atexit.register(_finish_all)
