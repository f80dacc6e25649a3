"""Versions: order, equality, pins and ranges."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.engines.versions import Pin, canonical, order, pep_440, same
from gpustackd.errors import BadRow

IN_ORDER = ["0.1", "0.5.5.alpha2", "0.5.5.beta1", "0.5.5.rc1", "0.5.5.rc2", "0.5.5.rc10", "0.5.5",
            "0.5.5.post3", "0.5.12", "0.10.1", "0.10.1.1", "2.1.rc2", "2.1", "25.04"]  # fmt: skip


@pytest.mark.parametrize(("older", "newer"), list(itertools.combinations(IN_ORDER, 2)))
def test_the_workers_order(older, newer):
    assert order(older) < order(newer)


@pytest.mark.parametrize(
    ("one", "other"),
    [("v0.11.0", "0.11.0"), ("0.11", "0.11.0"), ("1-2_3+4", "1.2.3.4"), ("V1.0", "1")],
)
def test_spellings_that_the_order_does_not_tell_apart(one, other):
    assert order(one) == order(other)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("0.11.0", "v0.11.0", True),
        ("0.11", "0.11.0", True),
        ("2.1.rc2", "2.1rc2", True),
        ("1.0-alpha.1", "1.0a1", True),
        ("1.0.post3", "1.0-3", True),
        ("1.0.post3", "1.0", False),
        ("0.11.0", "0.11.1", False),
        ("0.11.0+cu128", "0.11.0", False),
        ("0.11.0-mine", "0.11.0", False),
        ("v0.11.0-mine", "0.11.0-MINE", True),
        ("latest", " latest ", True),
        ("1.0", "1.0.dev0", False),
    ],
)
def test_versions_are_equal_as_pep_440_has_it(one, other, equal):
    assert same(one, other) is equal


PEP_440_ORDER = ["1.0.dev1", "1.0a1.dev1", "1.0a1", "1.0b2", "1.0rc1", "1.0", "1.0+a", "1.0+1",
                 "1.0.post1.dev1", "1.0.post1", "1.1", "1!0.1"]  # fmt: skip


@pytest.mark.parametrize(("older", "newer"), list(itertools.combinations(PEP_440_ORDER, 2)))
def test_the_order_of_pep_440(older, newer):
    first, second = pep_440(older), pep_440(newer)
    assert first is not None
    assert second is not None
    assert first < second


@pytest.mark.parametrize(
    ("pin", "yes", "no"),
    [
        ("0.11.0", ["0.11.0", "v0.11", "0.11"], ["0.11.1", "0.11.0.post1", "x"]),
        (">=0.11, <0.13", ["0.11", "0.12.9"], ["0.10.9", "0.13.0", "weird"]),
        ("==0.11.*", ["0.11.0", "0.11.7"], ["0.12", "0.1.1"]),
        ("!=0.11.*", ["0.12"], ["0.11.3"]),
        ("~=0.11.2", ["0.11.2", "0.11.9"], ["0.11.1", "0.12"]),
        ("~=0.11", ["0.12"], ["1.0"]),
        (">0.11,!=0.12", ["0.11.1", "0.13"], ["0.11", "0.12.0"]),
    ],
)
def test_a_pin_names_a_version_or_a_range(pin, yes, no):
    read = Pin.of(pin)
    assert [v for v in yes + no if read.admits(v)] == yes


@pytest.mark.parametrize("text", [">=", ">=a,b", "===1.0", "=>1", "1.0,>=2", "~=x", ">=1,,<2"])
def test_a_range_that_cannot_be_read_is_named(text):
    with pytest.raises(BadRow, match=re.escape("backend_version")):
        Pin.of(text)


@given(st.text(max_size=30))
def test_any_text_has_its_place(text):
    assert (order(text) < order("1.0")) or (order(text) >= order("1.0"))
    assert canonical(text) == canonical(f" {text} ")
    assert Pin(text).admits(text)


@pytest.mark.parametrize("text", ["9" * 5000, f"1.{'9' * 5000}", f"1.rc{'9' * 5000}", f"1+{'a' * 5000}"])
def test_endless_numbers_are_no_versions(text):
    assert pep_440(text) is None
    assert order(text) != order("1.0")


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4)
)
def test_numbers_compare_as_numbers_in_both_orders(one, other):
    def cut(numbers):
        while len(numbers) > 1 and numbers[-1] == 0:
            numbers = numbers[:-1]
        return numbers

    a, b = (".".join(map(str, n)) for n in (one, other))
    assert (order(a) < order(b)) == (pep_440(a) < pep_440(b)) == (cut(one) < cut(other))
