"""jsonb of strangers: whatever stands in one value, a statement that reads it goes on."""

from __future__ import annotations

import pytest

from gpustackd.store.postgres.jsonb import MAX_DEPTH, Unreadable, decode


@pytest.mark.parametrize("text", ['{"a": [1, null, true]}', "5", '"x"', "[" * MAX_DEPTH + "]" * MAX_DEPTH])
def test_values_come_out_as_they_are(text: str) -> None:
    assert not isinstance(decode(text), Unreadable)


def test_brackets_in_words_are_no_depth() -> None:
    words = ["[" * 500, '\\"' + "{" * 500]
    assert decode('["' + "[" * 500 + '", "\\"' + "{" * 500 + '"]') == [words[0], '"' + "{" * 500]


def test_many_brackets_side_by_side_are_no_depth() -> None:
    assert decode("[" + "[]," * 999 + "[]]") == [[]] * 1000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than"),
        ("[" * 5000 + "]" * 5000, "nested more than"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "nested more than"),
        ("[" + "9" * 5000 + "]", "number of thousands of digits"),
    ],
)
def test_what_would_break_the_reader_is_a_value_that_says_so(text: str, why: str) -> None:
    value = decode(text)
    assert isinstance(value, Unreadable)
    assert why in value
