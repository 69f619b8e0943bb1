"""Plans run for real: interpreted once, carried by a transport, verified and measured."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardroute.executors.attention.seam import Arithmetic
    from shardroute.executors.measuring.copies import calibrate_here
    from shardroute.executors.resharding.drop_ins import reshard, xferdtensor
    from shardroute.executors.resharding.resharders import Resharder
    from shardroute.executors.resharding.transfers import Transfer
    from shardroute.executors.run import TRANSPORTS, Mismatch, RunResult, run_plan
    from shardroute.executors.transports.seam import Session, Transport, Trial

__all__ = [
    "TRANSPORTS",
    "Arithmetic",
    "Mismatch",
    "Resharder",
    "RunResult",
    "Session",
    "Transfer",
    "Transport",
    "Trial",
    "calibrate_here",
    "reshard",
    "run_plan",
    "xferdtensor",
]

_HOMES = {
    "Arithmetic": "attention.seam",
    "calibrate_here": "measuring.copies", "TRANSPORTS": "run", "Mismatch": "run", "RunResult": "run", "run_plan": "run",
    "Resharder": "resharding.resharders", "Transfer": "resharding.transfers", "reshard": "resharding.drop_ins",
    "xferdtensor": "resharding.drop_ins",
    "Session": "transports.seam", "Transport": "transports.seam", "Trial": "transports.seam",
}  # fmt: skip


def __getattr__(name: str) -> object:
    # Loaded when asked for: the program's entry point lies in this package, and must catch Ctrl-C while NumPy and all load.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
