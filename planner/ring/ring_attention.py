"""Strategies `ring`, `ulysses` and `hybrid`: heads split among `split` neighbours, K and V round a ring across them.

`ring` is split 1 (only the ring), `ulysses` is split n_ranks (only the all-to-all), `hybrid` is what lies between: the all-to-all
inside an NVLink domain, the ring across (Liu et al. 2023, arXiv 2310.01889; Jacobs et al. 2023, arXiv 2309.14509; Fang and Zhao
2024, arXiv 2405.07719).
"""

from shardroute.planner.plans import SOURCE, TARGET, Kind
from shardroute.planner.ring.drafts import Draft, Load
from shardroute.planner.ring.exchanges import SENT_US, collect, neighbours, resident, spread
from shardroute.planner.ring.rotations import NEEDED_US, SUMLESS_US, SUMMED_US, Ring, Slots, need, rotate
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import LSE
from shardroute.planner.shares import Told, part, parts, untold


def add_ring(draft: Draft, progress: Told = untold) -> None:
    """Add all steps of the draft's pass; its heads say how many neighbours share them. progress is told the share of them."""
    needing, *adding = parts(progress, _weights(draft))
    _Rings(draft, needing).add(*adding)


def _weights(draft: Draft) -> tuple[float, ...]:
    """Microseconds that each rank's part takes: to find what is needed, and of `add` as its parameters follow."""
    what, split, n_ranks = draft.what, draft.heads.split, draft.attention.n_ranks
    n_places, sent_us = n_ranks // split, split * SENT_US if split > 1 else 0.0
    forward, backward = what is not Pass.BACKWARD, what is not Pass.FORWARD
    return (
        n_places * n_places / n_ranks * NEEDED_US,
        forward * 2 * sent_us, forward * n_places * SUMLESS_US, (not backward) * sent_us,
        backward * sent_us, backward * n_places * SUMMED_US, backward * 2 * sent_us,
    )  # fmt: skip


class _Rings:
    """One ring for each place among neighbours: the ranks at that place."""

    def __init__(self, draft: Draft, progress: Told) -> None:
        self.draft = draft
        split = draft.heads.split
        self.n_places = draft.attention.n_ranks // split
        self.split = split
        members = [neighbours(draft, i * split) for i in range(self.n_places)]
        self.needed = need(draft, members, keys_travel=True, progress=progress)
        self.rings = [[i * split + place for i in range(self.n_places)] for place in range(split)]
        self.slots = Slots()

    def add(self, spreading: Told, attending: Told, collecting: Told, giving: Told, differing: Told, returning: Told) -> None:
        """Add the steps; each part tells its share: q, k and v to those who work on them, the forward rotation, o back home, dO,
        the backward rotation, and gradients back home.
        """
        draft, what = self.draft, self.draft.what
        # Where q, k, v and do lie for whoever works on them.
        q = kv = do = SOURCE
        if self.split > 1 and what is not Pass.BACKWARD:
            q = self._spread(part(spreading, 0.0, 0.5), "q")
            kv = self._spread(part(spreading, 0.5, 1.0), "k", "v")
        o = TARGET
        if what is not Pass.BACKWARD:
            o = self._own("o") if self.split > 1 and what is Pass.FORWARD else TARGET
            self._rotate(attending, Kind.ATTEND, kv, stays=[(("q",), q)], kept=[(("o",), o), ((LSE,), TARGET)])
            if o != TARGET:
                collect(draft, ["o"], o, collecting)
        if what is Pass.FORWARD:
            return
        saved = SOURCE if what is Pass.BACKWARD else TARGET
        dq = dkv = TARGET
        if self.split > 1:
            do, dq, dkv = self._spread(giving, "do"), self._own("dq"), self._own("dk", "dv")
        stays = [(("q",), q), (("o", LSE), saved), (("do",), do)]
        self._rotate(differing, Kind.GRAD, kv, stays=stays, kept=[(("dq",), dq)], sums=dkv)
        if self.split > 1:
            collect(draft, ["dq"], dq, part(returning, 0.0, 0.5))
            collect(draft, ["dk", "dv"], dkv, part(returning, 0.5, 1.0))

    def _rotate(
        self,
        progress: Told,
        kind: Kind,
        blocks: int,
        stays: list[tuple[tuple[str, ...], int]],
        kept: list[tuple[tuple[str, ...], int]],
        sums: int | None = None,
    ) -> None:
        rings = [
            Ring(
                ranks,
                [[(self._load(names, rank), at) for names, at in stays] for rank in ranks],
                [[(self._load(names, rank), at) for names, at in kept] for rank in ranks],
                [(self._load(("k", "v"), rank), blocks) for rank in ranks],
                [] if sums is None else [(self._load(("dk", "dv"), rank), sums) for rank in ranks],
            )
            for ranks in self.rings
        ]
        rotate(self.draft, rings, self.needed, kind, self.slots, progress=progress)

    def _load(self, tensors: tuple[str, ...], rank: int) -> Load:
        return resident(self.draft, tensors, rank)

    def _own(self, *tensors: str) -> int:
        """A slot with room for what any rank works on."""
        return self.draft.slot(self._load(tensors, rank) for rank in range(self.draft.attention.n_ranks))

    def _spread(self, progress: Told, *tensors: str) -> int:
        slot = self._own(*tensors)
        spread(self.draft, tensors, slot, progress)
        return slot
