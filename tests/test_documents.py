"""A key that stands twice in an object of JSON is refused, wherever files of JSON are read."""

import json
import zipfile
from pathlib import Path

import pytest
from hand_plans import rows_to_columns
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.exchange import load_layout
from shardroute.planner.layouts import load_model
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.timelines import load_timeline
from shardroute.topologies.documents import decode_json
from shardroute.topologies.errors import InputError, PlanError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_what_holds_no_key_twice_is_read_however_it_is_written(value: object, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)

    assert decode_json(text.encode(errors="surrogatepass"), "x") == value if "\\ud" not in text else True


@pytest.mark.parametrize("text", [b'{"a":1,"a":1}', b'{"a":1,"b":{"c":[{"a":1,"a":2}]}}', b' {"a" : 1, "\\u0061" : 2}\n'])
def test_a_key_that_stands_twice_is_named(text: bytes) -> None:
    with pytest.raises(InputError, match=r"^x: key 'a' stands twice in one object; keep one of the two$"):
        decode_json(text, "x")


def test_plans_timelines_layouts_and_configs_are_read_so(tmp_path: Path) -> None:
    save_plan(rows_to_columns(), tmp_path / "a.plan")
    with zipfile.ZipFile(tmp_path / "a.plan") as old, zipfile.ZipFile(tmp_path / "twice.plan", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"{", b'{"strategy":"mine",', 1) if name == "header.json" else data)
    timeline = {"format": "shardroute-timeline", "schema": 1, "kind": "predicted", "digest": "d", "source": "s"}
    text = json.dumps({**timeline, "start_s": [], "end_s": []})
    (tmp_path / "t.json").write_text(text.replace("{", '{"kind": "measured",', 1))
    (tmp_path / "l.json").write_text('{"format": "shardroute-layout", "version": 1, "tensors": [], "tensors": []}')
    (tmp_path / "c.json").write_text('{"model_type": "llama", "model_type": "qwen3"}')

    with pytest.raises(PlanError, match="key 'strategy' stands twice"):
        load_plan(tmp_path / "twice.plan")
    with pytest.raises(InputError, match="key 'kind' stands twice"):
        load_timeline(tmp_path / "t.json")
    with pytest.raises(InputError, match="key 'tensors' stands twice"):
        load_layout(tmp_path / "l.json")
    with pytest.raises(InputError, match="key 'model_type' stands twice"):
        load_model(str(tmp_path / "c.json"))
