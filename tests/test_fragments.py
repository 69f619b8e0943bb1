"""Fragments, tensors and problems: no number gets in that 64-bit arithmetic on it couldn't hold."""

import numpy as np
import pytest

from shardroute.planner.layouts.fragments import MAX_DIMS, MAX_ELEMENTS, Fragments
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.problems import Problem, one_tensor
from shardroute.topologies.errors import InputError


def fragments(**changes) -> Fragments:
    """Three elements on rank 0, changed."""
    columns = {"rank": [0], "lo": [[0]], "hi": [[3]], "buffer": [0], "offset": [0], "strides": [[1]], "buffer_size": [3]}
    return Fragments(shape=changes.pop("shape", (3,)), **{name: np.asarray(v) for name, v in (columns | changes).items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": [[-(2**63)]]}, "reach over 2\\^59"),
        ({"strides": [[2**62]]}, "reach over 2\\^59"),
        ({"strides": [[2**63]]}, "column strides: expected int64"),
        ({"strides": [[MAX_ELEMENTS]], "hi": [[1]]}, "reach over 2\\^59"),
        ({"offset": [2**62], "buffer_size": [2**62 + 3]}, "reach over 2\\^59"),
        ({"offset": [-(2**63)]}, "reach over 2\\^59"),
        ({"buffer_size": [2**63 - 1]}, "reach over 2\\^59"),
        ({"shape": (2**32, 2**32), "lo": [[0, 0]], "hi": [[1, 1]], "strides": [[1, 1]]}, "2\\^59 elements or more"),
        ({"shape": (0, 2**62)}, "2\\^59 elements or more"),
        ({"shape": (1,) * (MAX_DIMS + 1)}, f"a shape of {MAX_DIMS + 1} dims"),
        ({"rank": [2**32]}, "column rank: expected int32"),
        ({"rank": [MAX_RANKS]}, f"rank {MAX_RANKS} is above"),
        ({"hi": [[2.5]]}, "column hi: expected int64"),
    ],
)
def test_what_would_wrap_is_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        fragments(**changes)


def test_the_largest_numbers_that_are_accepted_work() -> None:
    found = fragments(shape=(MAX_ELEMENTS - 1,), hi=[[MAX_ELEMENTS - 1]], buffer_size=[MAX_ELEMENTS])

    assert found.n_elements.tolist() == [MAX_ELEMENTS - 1]


def test_equal_columns_make_equal_fragments_and_one_number_makes_a_difference() -> None:
    assert fragments() == fragments()
    assert hash(fragments()) == hash(fragments())
    assert fragments() != fragments(buffer_size=[4])


def test_a_tensor_that_cannot_be_counted_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"tensor w: .* 2\^59 elements or more"):
        Tensor("w", (2**31, 2**31), "u8")


def test_ranks_that_together_hold_more_than_can_be_counted_are_refused() -> None:
    shape = (2**55,)
    rows = np.zeros((16, 1), dtype=np.int64)
    held = Fragments.dense(shape, range(16), rows, rows + 2**55)

    with pytest.raises(InputError, match=r"source layout: its ranks hold more than 2\^61 bytes"):
        one_tensor(shape, "f64", held, held)


def test_a_tensor_given_twice_among_many_is_named() -> None:
    held = fragments()
    names = [*(f"w{i}" for i in range(60_000)), "w59999"]
    layout = Layout((held,) * len(names), tuple((name,) for name in names))

    with pytest.raises(InputError, match="tensor w59999 is given twice"):
        Problem(tuple(Tensor(name, (3,), "u8") for name in names), layout, layout, 1)
