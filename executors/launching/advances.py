"""How far a run has come, by what its ranks let others see of themselves (see `boards`): their process ids, phases and shares."""

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.foresee import Foreseen
from shardroute.planner.shares import Told


def prepared_share(
    pid: NDArray[np.int64], phase: NDArray[np.uint32], share: NDArray[np.float64], foreseen: Foreseen
) -> float:
    """The share that is done of what comes before the first trial: starting the ranks, and filling their sources."""
    if phase.min(initial=1) > 0:
        return 1.0
    started_s = foreseen.starting_s * int(np.count_nonzero(pid)) / len(pid)
    filled_s = foreseen.filling_s * float(np.where(phase > 0, 1.0, share).mean())
    return (started_s + filled_s) / max(foreseen.starting_s + foreseen.filling_s, 1e-9)


def moved_share(at_step: NDArray[np.int64], n_steps: int) -> float:
    """The share of a plan's steps that ranks have come past, in the mean."""
    return min(float(np.maximum(at_step, 0).mean()) / n_steps, 1.0) if n_steps and len(at_step) else 0.0


def trials_share(
    phase: NDArray[np.uint32], share: NDArray[np.float64], moved: float, n_trials: int, foreseen: Foreseen
) -> float:
    """The share that is done of all trials, each of which moves, then verifies; `moved` of the moving of the one that goes on.

    0 until that moves, and while any rank still gets ready for the first.
    """
    trial = min((int(phase.min(initial=2 * n_trials)) - 1) // 2, n_trials - 1)
    if trial < 0:
        return 0.0
    verified = float(np.where(phase > 2 * trial + 1, share, 0.0).mean()) if len(phase) else 1.0
    done_s = foreseen.moving_s * moved + foreseen.verifying_s * verified
    return (trial + done_s / max(foreseen.trial_s, 1e-9)) / n_trials


def once_begun(told: Told, also: Told | None = None) -> Told:
    """What to tell the share of trials: `told` hears it from where it is above 0 on, as it hears of getting ready before; `also`
    hears all.
    """

    def tell(share: float) -> None:
        if share > 0:
            told(share)
        if also is not None:
            also(share)

    return tell
