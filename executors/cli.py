"""The running half of the command line, and the program's entry point."""

from shardroute.planner.cli.program import main

__all__ = ["main"]

from shardroute.planner import cli  # noqa: F401
