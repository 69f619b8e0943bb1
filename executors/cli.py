"""The program's entry point. It loads the commands itself, so that Ctrl-C ends it in one line even while they load.

Rule: nothing is imported above `main` but what Python has loaded anyway.
"""

import os
import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Run the command line. Only the first Ctrl-C counts: ending what runs takes moments, which a second must not cut short."""
    if sys.stderr is None:  # closed by the shell (2>&-): what is said there must not reach standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        import signal
        from types import FrameType

        def interrupt(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell starts us to ignore it
            signal.signal(signal.SIGINT, interrupt)
        from shardroute.executors.commands import main as run_program

        run_program()
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:  # with which typer ends silently
            raise
        print("Aborted.", file=sys.stderr)
        sys.exit(_INTERRUPTED)
