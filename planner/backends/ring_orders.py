"""In which order the rings of a collective pass its ranks: what predictions reckon with, and what emulation runs."""

import numpy as np
from numpy.typing import NDArray


def ring_orders(group: NDArray[np.int32], root: int, domain: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """The rings of a group of ranks, from its root where it has one (-1: none), domain by domain.

    As many rings as every domain of the group has members, each entering a domain by another GPU's NIC; one where all are in one
    domain. `domain` gives the NVLink domain of every rank.
    """
    domains = [group[domain[group] == d] for d in np.unique(domain[group])]
    domains.sort(key=lambda members: root not in members)
    n_rings = min(len(members) for members in domains) if len(domains) > 1 else 1
    orders = []
    for i in range(n_rings):
        order = np.concatenate([np.roll(members, -i) for members in domains])
        if root >= 0:
            order = np.concatenate([[root], order[order != root]]).astype(np.int32)
        orders.append(order)
    return orders
