"""Back-off: doubling, bounded, spread."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.daemon.backoff import Backoff


def test_delays_double_from_one_second_to_a_minute() -> None:
    backoff = Backoff(Random(1), spread=0.0)
    assert [backoff.seconds(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


@given(st.integers(0, 10**9), st.integers())
def test_a_delay_stays_within_a_quarter_below_its_whole(failures: int, seed: int) -> None:
    whole = Backoff(Random(seed), spread=0.0).seconds(failures)
    assert 0.75 * whole <= Backoff(Random(seed)).seconds(failures) <= whole <= 60


def test_equal_failures_do_not_come_back_together() -> None:
    backoff = Backoff(Random(7))
    assert len({backoff.seconds(3) for _ in range(100)}) == 100


def test_the_same_seed_gives_the_same_delays() -> None:
    assert [Backoff(Random(3)).seconds(n) for n in range(9)] == [
        Backoff(Random(3)).seconds(n) for n in range(9)
    ]
