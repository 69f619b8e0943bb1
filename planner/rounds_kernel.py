"""The loop of rounds. It stays inside the subset of Python that Numba compiles, so the same lines run over lists and arrays."""

from shardroute.planner.simulator.kernel import Column


def number(dep_ptr: Column[int], deps: Column[int], found: Column[int], n: int) -> None:
    """Set `found` of each of n rows to one more than the largest of the rows that it waits for; 0 where it waits for none."""
    for row in range(n):
        latest = -1
        for at in range(dep_ptr[row], dep_ptr[row + 1]):
            latest = max(latest, found[deps[at]])
        found[row] = latest + 1


FUNCTIONS = ("number",)
