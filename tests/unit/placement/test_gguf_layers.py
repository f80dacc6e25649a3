"""Layers on devices: fill, balance, deepest level, choice of devices; the rule of llama.cpp's split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpustackd.engines.llama_cpp.devices import layers_per_device
from gpustackd.placement.selectors.gguf.layer_costs import Layers

ADDS = st.lists(st.integers(1, 6), min_size=1, max_size=7)
ROOMS = st.lists(st.integers(-2, 14), min_size=1, max_size=4)


def ways(count: int, devices: int) -> list[tuple[int, ...]]:
    """All ways to give `count` layers to devices, at least one each."""
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, count), strict=False))
        for cuts in itertools.combinations(range(1, count), devices - 1)
    ]


def holds(adds: list[int], start: int, counts: tuple[int, ...], rooms: list[int]) -> bool:
    for layers, room in zip(counts, rooms, strict=True):
        if sum(adds[start : start + layers]) > room:
            return False
        start += layers
    return True


@given(ADDS, ROOMS, st.data())
@settings(max_examples=400)
def test_a_fill_is_found_exactly_where_there_is_one(
    adds: list[int], rooms: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(adds) - 1))
    found = Layers(adds).filled(start, rooms)
    if found is None:
        assert not any(holds(adds, start, way, rooms) for way in ways(len(adds) - start, len(rooms)))
    else:
        assert sum(found) == len(adds) - start
        assert min(found) >= 1
        assert holds(adds, start, found, rooms)


@given(ADDS, ROOMS)
@settings(max_examples=400)
def test_the_deepest_level_is_the_last_one_that_some_of_the_devices_hold(
    adds: list[int], rooms: list[int]
) -> None:
    layers = Layers(adds)
    some = [c for n in range(1, len(rooms) + 1) for c in itertools.combinations(rooms, n)]
    fitting = [n for n in range(1, len(adds) + 1) if any(layers.filled(len(adds) - n, list(c)) for c in some)]
    assert layers.deepest(rooms) == max(fitting, default=0)


@given(ADDS, st.lists(st.integers(1, 16), min_size=2, max_size=5), st.integers(2, 4), st.integers(0, 3))
@settings(max_examples=400)
def test_devices_are_chosen_exactly_where_some_choice_serves(
    adds: list[int], free: list[int], count: int, rest: int
) -> None:
    layers = Layers(adds)
    chosen = layers.chosen(0, free, (rest, rest, rest), count)

    def serves(some: tuple[int, ...]) -> bool:
        return layers.filled(0, [free[i] - rest for i in some]) is not None

    serving = [
        some
        for n in range(1, count + 1)
        for some in itertools.combinations(range(len(free)), n)
        if serves(some)
    ]
    assert (chosen in serving) if serving else chosen is None


def test_a_last_device_that_lacks_room_for_the_output_leaves_it_to_another():
    assert Layers([1, 1, 1]).chosen(0, [3, 3, 9], (0, 0, 3), 2) == (0, 2)


@given(ADDS, st.lists(st.integers(4, 30), min_size=2, max_size=4), st.integers(0, 3))
@settings(max_examples=300)
def test_a_balanced_fill_holds_wherever_a_fill_does(adds: list[int], free: list[int], rest: int) -> None:
    layers = Layers(adds)
    rests = [rest] * len(free)
    found = layers.balanced(0, free, rests)
    assert (found is None) == (layers.filled(0, [f - rest for f in free]) is None)
    if found is not None:
        assert holds(adds, 0, found, [f - rest for f in free])


def test_equal_devices_get_equal_numbers_of_layers():
    assert Layers([1] * 80).balanced(0, [60] * 4, [2] * 4) == (20, 20, 20, 20)


def test_a_device_twice_as_large_gets_about_twice_the_layers():
    small, large = Layers([1] * 60).balanced(0, [50, 100], [0, 0])
    assert (small, large) == (20, 40)


@given(ADDS, st.integers(0, 14), st.integers(1, 7))
def test_the_longest_run_that_fits(adds: list[int], room: int, last: int) -> None:
    last = min(last, len(adds))
    tail = adds[-last:]
    runs = [b - a for a in range(last) for b in range(a + 1, last + 1) if sum(tail[a:b]) <= room]
    assert Layers(adds).longest(room, last) == max(runs, default=0)


@pytest.mark.parametrize(
    ("shares", "layers", "counts"),
    [
        ((1, 1), 81, (41, 40)),
        ((8, 10), 81, (36, 45)),
        ((1,) * 6, 62, (11, 10, 10, 11, 10, 10)),
        ((3, 0, 1), 8, (6, 0, 2)),
        ((17163091968, 16106143744, 24683479040), 40, (12, 11, 17)),
        ((1, 1), 0, (0, 0)),
    ],
)
def test_shares_become_layers_by_the_rule_of_llama_cpp(shares, layers, counts):
    assert layers_per_device(shares, layers) == counts


@given(st.lists(st.integers(1, 40), min_size=1, max_size=15))
def test_numbers_of_layers_as_shares_give_these_numbers(counts: list[int]) -> None:
    assert layers_per_device(counts, sum(counts)) == tuple(counts)
