"""`srun` on a cluster whose nodes are all this host: as many tasks as asked for, which find what Slurm leaves in the environment.

Takes the options that the documents show and refuses others. Tasks of `shardroute` are forks of a process that has loaded it:
as many interpreters on two cores would take a minute to start.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

# A task that a signal ended; as shells count.
SIGNALLED = 128


def tasks_of(asked: argparse.Namespace) -> list[dict[str, str]]:
    """What each task finds in its environment; slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"."""
    n_nodes = asked.nodes or 1
    n_tasks = asked.ntasks or n_nodes * (asked.ntasks_per_node or 1)
    per_node = asked.ntasks_per_node or -(-n_tasks // n_nodes)
    step = {
        "SLURM_NTASKS": str(n_tasks), "SLURM_NNODES": str(n_nodes), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    placed = [(task, *divmod(task, per_node)) for task in range(n_tasks)]
    return [step | {"SLURM_PROCID": str(t), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)} for t, node, local in placed]


def forked(run: Callable[[], None]) -> int:
    """Start a task in a copy of this process; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    os._exit(code)


def started(tasks: Sequence[dict[str, str]], command: list[str]) -> list[int]:
    """Start all tasks; their process ids."""
    if command[0] != "shardroute":
        return [forked(lambda task=task: os.execvpe(command[0], command, os.environ | task)) for task in tasks]
    import shardroute.executors.commands  # noqa: F401 - all that a task needs
    from shardroute.executors.cli import main

    def run(task: dict[str, str]) -> None:
        os.environ.update(task)
        sys.argv = command
        main()

    return [forked(lambda task=task: run(task)) for task in tasks]


def main() -> int:
    """Start the tasks and wait for all; the largest of their exit codes."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    parser.add_argument("-n", "--ntasks", type=int)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.command:
        parser.error("no command was given")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started(tasks_of(asked), asked.command)]
    return max(code if code >= 0 else SIGNALLED - code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
