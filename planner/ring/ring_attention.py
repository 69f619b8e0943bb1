"""Strategies `ring`, `ulysses` and `hybrid`: heads split among `split` neighbours, K and V round a ring across them.

`ring` is split 1 (only the ring), `ulysses` is split n_ranks (only the all-to-all), `hybrid` is what lies between: the all-to-all
inside an NVLink domain, the ring across (Liu et al. 2023, arXiv 2310.01889; Jacobs et al. 2023, arXiv 2309.14509; Fang and Zhao
2024, arXiv 2405.07719).
"""

from shardroute.planner.plans import SOURCE, TARGET, Kind
from shardroute.planner.ring.drafts import Draft, Load
from shardroute.planner.ring.exchanges import collect, neighbours, resident, spread
from shardroute.planner.ring.rotations import Ring, Slots, need, rotate
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import LSE


def add_ring(draft: Draft) -> None:
    """Add all steps of the draft's pass; its heads say how many neighbours share them."""
    _Rings(draft).add()


class _Rings:
    """One ring for each place among neighbours: the ranks at that place."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        split = draft.heads.split
        self.n_places = draft.attention.n_ranks // split
        self.split = split
        members = [neighbours(draft, i * split) for i in range(self.n_places)]
        self.needed = need(draft, members, keys_travel=True)
        self.rings = [[i * split + place for i in range(self.n_places)] for place in range(split)]
        self.slots = Slots()

    def add(self) -> None:
        draft, what = self.draft, self.draft.what
        # Where q, k, v and do lie for whoever works on them.
        q = kv = do = SOURCE
        if self.split > 1 and what is not Pass.BACKWARD:
            q, kv = self._spread("q"), self._spread("k", "v")
        o = TARGET
        if what is not Pass.BACKWARD:
            o = self._own("o") if self.split > 1 and what is Pass.FORWARD else TARGET
            self._rotate(Kind.ATTEND, kv, stays=[(("q",), q)], kept=[(("o",), o), ((LSE,), TARGET)])
            if o != TARGET:
                collect(draft, ["o"], o)
        if what is Pass.FORWARD:
            return
        saved = SOURCE if what is Pass.BACKWARD else TARGET
        dq = dkv = TARGET
        if self.split > 1:
            do, dq, dkv = self._spread("do"), self._own("dq"), self._own("dk", "dv")
        stays = [(("q",), q), (("o", LSE), saved), (("do",), do)]
        self._rotate(Kind.GRAD, kv, stays=stays, kept=[(("dq",), dq)], sums=dkv)
        if self.split > 1:
            collect(draft, ["dq"], dq)
            collect(draft, ["dk", "dv"], dkv)

    def _rotate(
        self,
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
        rotate(self.draft, rings, self.needed, kind, self.slots)

    def _load(self, tensors: tuple[str, ...], rank: int) -> Load:
        return resident(self.draft, tensors, rank)

    def _own(self, *tensors: str) -> int:
        """A slot with room for what any rank works on."""
        return self.draft.slot(self._load(tensors, rank) for rank in range(self.draft.attention.n_ranks))

    def _spread(self, *tensors: str) -> int:
        slot = self._own(*tensors)
        spread(self.draft, tensors, slot)
        return slot
