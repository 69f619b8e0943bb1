"""One thread for all transfers over a world's ranks: it is the same one each time, and ends with whoever holds it."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from shardroute.executors.resharding.workers import Worker, worker_of

_SOON_S = 20.0

# A rank alone: two resharders over one group, each run three times, then closed; and one that is left open at the end. What is
# printed: threads and right bytes; whether their thread lives on after both were closed; threads again.
_ALONE = """
import os, threading
import torch, torch.distributed as dist
from shardroute.executors import Resharder
from shardroute.planner.exchange import Sharding
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.layouts.tensors import Tensor

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
side = {"w": (Tensor("w", (4, 4), "f32"), Sharding(Mesh.of({"x": 1}, [0]), (Replicate(),)))}
group = dist.new_group(backend="gloo")
made = [Resharder(side, side, group=group) for _ in range(2)]
serving = lambda: [thread for thread in threading.enumerate() if thread.name == "shardroute"]
given, got, idents = torch.ones(4, 4), torch.zeros(4, 4), set()
for resharder in made * 3:
    resharder.run({"w": given}, {"w": got}).wait()
    idents |= {thread.native_id for thread in serving()}
print(len(idents), bool((got == 1).all()))
made.pop().close()
thread, = serving()
made.pop().close()
del resharder
thread.join(20)
print(thread.is_alive())
left_open = Resharder(side, side, group=group)
left_open.run({"w": given}, {"w": got}).wait()
print(len(serving()))
"""


def ident_of(worker: Worker) -> int:
    """The thread that works."""
    found: list[int] = []
    assert worker.do(lambda: found.append(threading.get_native_id())).wait(_SOON_S)
    return found[0]


def serving() -> set[int]:
    return {thread.native_id or 0 for thread in threading.enumerate() if thread.name == "shardroute"}


def ends(ident: int) -> bool:
    """Whether the thread ends soon."""
    until_s = time.monotonic() + _SOON_S
    while ident in serving() and time.monotonic() < until_s:
        time.sleep(0.01)
    return ident not in serving()


def test_all_work_is_done_in_order_in_one_thread() -> None:
    worker, order = Worker(), []

    events = [worker.do(lambda n=n: order.append(n)) for n in range(100)]

    assert all(event.wait(_SOON_S) for event in events)
    assert order == list(range(100))
    assert len({ident_of(worker) for _ in range(20)}) == 1


def test_worlds_of_one_key_share_a_worker_as_long_as_somebody_holds_it() -> None:
    first, other = worker_of(-17), worker_of(-18)
    ident = ident_of(first)

    assert worker_of(-17) is first
    assert other is not first
    assert ident_of(worker_of(-17)) == ident
    assert ident_of(other) != ident


def test_the_thread_ends_when_nobody_holds_its_worker_though_its_last_work_did() -> None:
    class Holder:
        def __init__(self) -> None:
            self.worker = worker_of(-19)
            self.ended = self.worker.do(self.work)

        def work(self) -> None:
            self.ident = threading.get_native_id()

    holder = Holder()
    assert holder.ended.wait(_SOON_S)
    ident = holder.ident

    del holder
    gc.collect()

    assert ends(ident)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 on: this is what it warns of
def test_a_forked_child_gets_a_thread_of_its_own() -> None:
    worker = Worker()
    ident = ident_of(worker)

    pid = os.fork()
    if pid == 0:
        os._exit(0 if ident_of(worker) != ident else 1)

    assert os.waitpid(pid, 0)[1] == 0
    assert ident_of(worker) == ident


def test_resharders_of_one_group_use_one_thread_which_ends_with_the_last_and_holds_up_no_exit() -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")

    done = subprocess.run([sys.executable, "-c", _ALONE], check=False, timeout=180, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", "True", "False", "1"]
