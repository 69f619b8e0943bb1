"""Sorts flows into classes of one route, cap and weight, and leaves out of their routes the links that never matter."""

import numpy as np

from shardroute.planner.simulator.kernel import ROUNDING
from shardroute.planner.simulator.tasks import Ints, TaskGraph


def sort_flows(graph: TaskGraph) -> tuple[Ints, Ints]:
    """Class of each task (-1: shares no link) and the first task of each class; classes are numbered by first task.

    Exact without a hash: cap, weight, length of the route and then its links, one after the other, refine the partition.
    """
    lengths = np.diff(graph.route_ptr)
    class_of = np.full(graph.n_tasks, -1)
    flows = np.flatnonzero((graph.amount > 0) & (lengths > 0))
    if not len(flows):
        return class_of, np.zeros(0, np.int64)
    label = np.zeros(len(flows), np.int64)
    for column in (graph.cap, graph.weight, lengths):
        values = column[flows]
        if (values != values[0]).any():
            label = _refined(label, np.unique(values, return_inverse=True)[1])
    n_labels = int(label.max()) + 1
    for at in range(int(lengths[flows].max())):
        reach = np.flatnonzero(lengths[flows] > at)
        links = graph.route_links[graph.route_ptr[flows[reach]] + at].astype(np.int64)
        finer = _refined(label[reach], links)
        # Routes that end here keep their label: length has set them apart from those that go on.
        label[reach] = finer + n_labels
        n_labels += int(finer.max()) + 1
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    class_of[flows] = rank[inverse]
    return class_of, flows[first[order]]


def binding_routes(graph: TaskGraph, tasks: Ints) -> tuple[Ints, Ints]:
    """CSR (pointers, links) of the routes of these tasks, without the links that can't be the only full one.

    Link l is implied by the links that come just before it on the routes, when no route begins at l and their capacities
    sum to no more than l's: what passes l has passed one of them. The same holds for the links just after. A full-bisection
    leaf-spine fabric drops out that way, and only NICs are left. The implying links must be smaller, by (capacity, index),
    so that no two links imply each other; the smallest link of a route therefore always stays.
    """
    lengths = np.diff(graph.route_ptr)[tasks]
    ptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    links = graph.route_links[np.repeat(graph.route_ptr[tasks] - ptr[:-1], lengths) + np.arange(ptr[-1])].astype(np.int64)
    owner = np.repeat(np.arange(len(tasks)), lengths)
    if not len(links) or len(_sorted_once(owner * graph.n_links + links)) < len(links):
        return ptr, links  # a flow that uses a link twice takes more of it than it brings
    before, after = np.roll(links, 1), np.roll(links, -1)
    before[ptr[:-1]] = -1
    after[ptr[1:] - 1] = -1
    keep = ~(_implied(links, before, graph) | _implied(links, after, graph))[links]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(owner[keep], minlength=len(tasks)))]), links[keep]


def _implied(links: Ints, neighbours: Ints, graph: TaskGraph) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which links are implied by their neighbours on one side; -1 marks the end of a route."""
    n_links, capacity = graph.n_links, graph.capacity
    link, neighbour = np.divmod(_sorted_once(links * (n_links + 1) + neighbours + 1), n_links + 1)
    neighbour -= 1
    sums = np.bincount(link, np.where(neighbour < 0, np.inf, capacity[neighbour]), n_links)
    rank = np.empty(n_links, np.int64)
    rank[np.lexsort((np.arange(n_links), capacity))] = np.arange(n_links)
    has_larger = np.zeros(n_links, np.bool_)
    has_larger[link[rank[neighbour] > rank[link]]] = True
    return (sums <= capacity * (1 + ROUNDING)) & ~has_larger


def _refined(label: Ints, values: Ints) -> Ints:
    """Labels 0, 1, 2, ... that are equal where both label and value are."""
    labels: Ints = np.unique(label * (int(values.max()) + 1) + values, return_inverse=True)[1]
    return labels


def _sorted_once(values: Ints) -> Ints:
    """The values in order, each once; np.unique of NumPy 2.3 hashes first, which took four times as long on 30,000 links."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]
