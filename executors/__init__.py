"""Plans run for real: interpreted once, carried by a transport, verified and measured."""

from shardroute.executors.measure import calibrate_here
from shardroute.executors.run import TRANSPORTS, Mismatch, RunResult, run_plan
from shardroute.executors.transports import Session, Transport, Trial

__all__ = ["TRANSPORTS", "Mismatch", "RunResult", "Session", "Transport", "Trial", "calibrate_here", "run_plan"]
