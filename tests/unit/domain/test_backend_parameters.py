"""The command line of an engine, as people write it into `backend_parameters`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.engines.flags import is_key, parse_flags
from gpustackd.errors import BadRow


@pytest.mark.parametrize(
    "written",
    [
        ["--tensor-parallel-size=4"],
        ["--tensor-parallel-size", "4"],
        ["--tensor-parallel-size 4"],
        ["-tp 4"],
        ["--tp=4"],
        ["--tensor_parallel_size=4"],
        ["--tensor-parallel-size \\\n 4"],
        ["--max-model-len 100 --tp '4'"],
    ],
)
def test_every_way_to_write_a_value_is_read(written):
    assert parse_flags(written).integer("tensor-parallel-size", "tp") == 4


def test_the_last_occurrence_wins():
    written = ["--tp=2", "--tensor-parallel-size", "4"]
    assert parse_flags(written).integer("tensor-parallel-size", "tp") == 4


@pytest.mark.parametrize("number", ["-1", "-.5", "-0.25", "-1e-3"])
def test_a_negative_number_is_a_value_not_a_flag(number):
    assert parse_flags(["--x", number]).text("x") == number


def test_a_flag_followed_by_a_flag_is_bare():
    read = parse_flags(["--trust-remote-code", "--tp", "2"])
    assert read.text("trust-remote-code") is None
    assert read.flag("trust-remote-code")
    assert read.integer("tp") == 2


@pytest.mark.parametrize("off", ["0", "false", "No", "OFF", "f", "n"])
def test_words_for_off_switch_a_flag_off(off):
    assert not parse_flags([f"--omni={off}"]).flag("omni")


def test_anything_else_switches_it_on_and_no_switches_it_off():
    assert parse_flags(["--omni=yes"]).flag("omni")
    assert not parse_flags(["--omni", "--no-omni"]).flag("omni")
    assert parse_flags(["--no-omni", "--omni"]).flag("omni")
    assert not parse_flags([]).flag("omni")


@pytest.mark.parametrize(
    "written",
    [
        ['--hf-overrides={"architectures": ["A B"]}'],
        ['--hf-overrides {"architectures": ["A B"]}'],
        ["--hf-overrides", '{"architectures": ["A B"]}'],
        ['--hf-overrides \'{"architectures": ["A B"]}\''],
        ['--tp 2 --hf-overrides={"architectures": ["A B"]} --pp 1'],
    ],
)
def test_json_is_kept_whole(written):
    assert parse_flags(written).text("hf-overrides") == '{"architectures": ["A B"]}'


def test_an_element_that_is_no_flag_is_one_word():
    assert parse_flags(["--served-name", "a name -x 1"]).text("served-name") == "a name -x 1"


def test_a_number_that_cannot_be_read_is_reported_with_flag_and_value():
    with pytest.raises(BadRow, match="--tp is 'two'"):
        parse_flags(["--tp=two"]).integer("tp")
    with pytest.raises(BadRow, match="--u is 'nan'"):
        parse_flags(["--u=nan"]).number("u")


def test_a_quote_that_does_not_close_is_reported():
    with pytest.raises(BadRow, match="does not close"):
        parse_flags(["--name 'half"])


@given(st.lists(st.text(max_size=40), max_size=8))
def test_any_text_is_read_or_refused_by_name(written):
    try:
        names = [f.name for f in parse_flags(written).flags]
    except BadRow as refused:
        names = [refused.field]
    assert not any(n.startswith("-") for n in names)


@given(st.text(alphabet="abcdefghij", min_size=1), st.integers(-(10**9), 10**9))
def test_a_written_integer_comes_back(name, number):
    assert parse_flags([f"--{name}", str(number)]).integer(name) == number
    assert parse_flags([f"--{name}={number}"]).integer(name) == number


def test_two_dashes_alone_are_no_key():
    assert not is_key("--")
    assert not is_key("-")
    assert is_key("-h")
