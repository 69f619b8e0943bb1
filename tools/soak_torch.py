"""Show what torch.distributed keeps of a thread that has sent and received over gloo and ended; nothing of shardroute takes part.

    python tools/soak_torch.py [--threads 20000]

Two ranks exchange 4 kB over and over, once in a single thread and once in a new thread each time; then rank 0's anonymous memory.
"""

import argparse
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def memory_bytes() -> int:
    """The pages of this process that are no file's, see proc(5)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def in_a_thread(work: Callable[[], None]) -> None:
    """Do it in a thread of its own, and wait for that."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def main() -> None:
    """Fork the other rank, exchange, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=20000)
    n = parser.parse_args().threads
    if n < 10:
        parser.error(f"--threads {n}: expected 10 or more")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder = tempfile.mkdtemp()
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    given, got = torch.zeros(1000), torch.zeros(1000)

    def exchange() -> None:
        for work in [dist.isend(given, 1 - rank), dist.irecv(got, 1 - rank)]:
            assert work is not None  # for ranks outside of the group only
            work.wait()

    for what, once in (("one thread", exchange), ("a thread each", lambda: in_a_thread(exchange))):
        for step in range(n):
            if step == n // 5:  # by then everything has been touched once
                before = memory_bytes()
            once()
        if rank == 0:
            print(f"{what}: {n} exchanges, {(memory_bytes() - before) / (n - n // 5):.0f} bytes each")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        os.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
