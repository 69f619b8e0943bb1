"""Megatron-Core's text for a pipeline layout against a stupid reading of it, letter by letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.importers.commands import layout_of_command
from shardroute.planner.importers.pipeline_layouts import parse_pipeline_layout
from shardroute.planner.layouts import CONVENTIONS, load_model, parse_spec
from shardroute.topologies.errors import InputError

# The example of Megatron-Core's own page, docs.nvidia.com/megatron-core: DeepSeek-V3's 61 layers over PP16 x VPP2.
DEEPSEEK = "Et*3|(tt|)*29,m|L"


def test_the_example_of_megatrons_page_is_read_as_the_page_says() -> None:
    found = parse_pipeline_layout(DEEPSEEK, 16, 61)

    assert found.layers == (3, *[2] * 29, 0, 0)
    assert (found.n_virtual, found.mtp_rank) == (2, 14)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_repetitions_commas_and_plain_letters_say_the_same(layers: list[int], n_virtual: int, data: st.DataObject) -> None:
    counts = layers * n_virtual
    plain = "|".join("t" * n for n in counts)
    short = "|".join(f"t*{n}" if n and data.draw(st.booleans()) else "t" * n for n in counts)
    short = short.replace("|", "|,") if data.draw(st.booleans()) else short

    read = parse_pipeline_layout(f"E{short}L", len(layers))

    assert read == parse_pipeline_layout(f"E{plain}L", len(layers))
    assert read.layers == tuple(stage.count("t") for stage in plain.split("|"))


@given(st.text("Etm|()*123,L", max_size=20), st.integers(1, 3))
def test_any_text_is_read_or_refused_in_words(text: str, pp: int) -> None:
    try:
        found = parse_pipeline_layout(text, pp)
    except InputError:
        return

    assert len(found.layers) == pp * found.n_virtual
    assert (text.count("E"), text.count("L")) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t|L", "one E must come first"),
        ("Et|t", "one L last"),
        ("Em|tL", "layers t must come before"),
        ("E|t|tL|", "L on another than the last"),
        ("Etx|L", "can't read 'x'"),
        ("E((tt)*2|)*2L", r"can't read '\('"),
        ("Et*9999999|L", "9999999"),
        ("Etm|tmL", "layers t must come before"),
        ("Etm|mL", "on one stage"),
    ],
)
def test_what_megatron_or_no_convention_takes_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_pipeline_layout(text, 2)


def test_mtp_on_a_stage_of_its_own_is_told() -> None:
    command = f"t --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout '{DEEPSEEK}'"

    assert "MTP layers are on pipeline rank 14" in " ".join(layout_of_command(command).notes)


def test_empty_virtual_stages_hold_nothing_and_every_layer_is_where_the_text_has_it() -> None:
    model, spec = load_model("qwen3-0.6b", 256), parse_spec("PP2[0,14,14,0] x VPP2")
    side = CONVENTIONS["megatron"](model, spec)

    layout = side.layout
    first = next(i for i, tensor in enumerate(model.parameters) if tensor.layer == 0)
    assert set(layout.fragments[first].rank.tolist()) == {1}


def test_a_rank_without_any_layer_between_the_ends_is_refused() -> None:
    with pytest.raises(InputError, match="a stage needs at least 1 layer"):
        parse_spec("PP3[3,0,3,2,0,2] x VPP2")
