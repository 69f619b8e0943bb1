"""The program's entry point. It loads the commands itself, so that Ctrl-C ends it in one line even while they load.

Rule: nothing is imported above `main` but what Python has loaded anyway.
"""

import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Run the command line."""
    try:
        from shardroute.executors.commands import main as run_program

        run_program()
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        sys.exit(_INTERRUPTED)
