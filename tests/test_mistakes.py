"""Words that the command line can't take: what was found is repeated, with what is expected."""

import pytest

from shardroute.topologies.errors import InputError
from shardroute.topologies.units import parse_tokens

RING = ["ring", "--model", "llama-3-8b", "--machine", "gb200-nvl72", "--gpus", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RING, "--seq", "abc"], "--seq: 'abc' is not a number of tokens (a number is needed); write for example '131072' or"),
        ([*RING, "--seq", "2.5x"], "--seq: '2.5x' is not a number of tokens (unit 'x' is unknown)"),
        ([*RING, "--seq", "1"], "--seq 1: expected 2 tokens or more"),
        ([*RING, "--seq", "64K", "--tp", "x"], "'x' is not a"),
        ([*RING, "--seq", "64K", "--batch", "many"], "'many' is not a"),
        (["plan-ring", "--cp", "2", "--heads", "2", "--head-dim", "4", "--machine", "cpu-processes", "--documents", "1K,y"],
         "--documents '1K,y': 'y' is not a number of tokens"),
        (["choose", "--op", "all-reduc", "--bytes", "1MiB", "--ranks", "4", "--machine", "dgx-h100"], "'all-reduc' is not one"),
        (["study", "ring-vs-seq", "--model", "llama-3-8b", "--cp", "4", "--machine", "gb200-nvl72", "--seqs", "64K,foo"],
         "--seqs '64K,foo': 'foo' isn't an item of it"),
        (["study", "foo"], "No such command 'foo'; there are gather-vs-reshard, refit-vs-domain, refit-vs-nic"),
        (["machines", "foo"], "No such command 'foo'; there are import, show"),
        (["zzz"], "No such command 'zzz'; there are bound, calibrate, check, choose"),
        (["plann"], "Did you mean 'plan'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_taken_is_repeated_with_what_is_expected(cli, arguments: list[str], words: str) -> None:
    code, out, err = cli(*arguments)

    assert (code, out) == (2, "")
    assert words in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 2**17), ("128K", 2**17), ("128k", 2**17), ("1M", 2**20), ("1.5K", 1536), (" 8 K ", 2**13)]
)
def test_lengths_of_contexts_are_counted_by_1024(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["0", "0.5", "1.0001K", "-1", "1KB", "1G", "", "K"])
def test_what_is_no_whole_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="number of tokens"):
        parse_tokens(text)


def test_a_plan_of_2k_tokens_is_one_of_2048(cli) -> None:
    call = ["plan-ring", "--cp", "2", "--heads", "2", "--head-dim", "4", "--machine", "cpu-processes", "--json"]

    told = [cli(*call, "--seq", text)[1] for text in ("2K", "2048")]

    assert told[0].partition('"plan_s"')[0] == told[1].partition('"plan_s"')[0]
