"""The tables of predictions in docs/ are what the program predicts today; `make docs` holds the slow rows, too."""

import docs_tables
import pytest

from shardroute.planner.validation.published import assumed_refits, published_refits
from shardroute.planner.validation.refits import refit_rows

# Refits that take less than a second each; all of them take half a minute.
QUICK = ("nemo_rs_q4b", "m2n_q235_direct", "nemo_broadcast_q30", "miles_q30_nccl")
UNSEEN = docs_tables.REFIT_HEAD.index("unseen")  # which rests on the other rows


@pytest.fixture(scope="module")
def quick() -> dict[str, str]:
    return dict(docs_tables.quick_tables())


@pytest.mark.parametrize("name", ["collectives", "ring", "ring-steps"])
def test_a_table_of_a_page_is_what_is_predicted_today(name: str, quick: dict[str, str]) -> None:
    assert docs_tables.table_of(name) == quick[name], "run python tools/docs_tables.py"


@pytest.mark.parametrize("name", QUICK)
def test_a_refit_of_the_page_is_what_is_predicted_today(name: str) -> None:
    published = next(row for row in published_refits() if row.name == name)
    [row] = refit_rows([published])

    wanted = docs_tables.refit_cells(published, row)

    lines = [line.strip("| ").split(" | ") for line in docs_tables.table_of("refits").splitlines()]
    of_this = [cells for cells in lines if cells[0] == wanted[0] and cells[-1] == wanted[-1]]
    assert [cells[:UNSEEN] for cells in of_this] == [wanted[:UNSEEN]], "run python tools/docs_tables.py"


def test_the_page_has_every_refit_that_is_counted() -> None:
    counted = [row for row in published_refits() if not row.group.startswith("early")]

    assert len(docs_tables.table_of("refits").splitlines()) == 2 + len(counted)


def test_the_page_has_every_refit_that_stands_beside_and_both_goals() -> None:
    assert len(docs_tables.table_of("beside").splitlines()) == 2 + len(assumed_refits())
    assert [line.count("unseen") for line in docs_tables.table_of("goals").splitlines()[2:]] == [1, 1]


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    text = "a\n<!-- table: x -->\n\n| old |\n\n<!-- end of table -->\nb\n<!-- table: y -->\n\n| kept |\n\n<!-- end of table -->\n"

    found = docs_tables.with_tables(text, {"x": "| new |"})

    assert found == text.replace("old", "new")


def test_shares_are_written_with_as_many_digits_as_count() -> None:
    shares = (0.0341, 1.04, -0.262, 0.0996, None)

    assert [docs_tables.share(value) for value in shares] == ["3.4 %", "104 %", "-26 %", "10 %", ""]
