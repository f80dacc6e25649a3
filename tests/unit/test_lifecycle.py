"""Lawful moves: every pair of states against the table of the contract (section 6, rule 6)."""

from __future__ import annotations

from itertools import product

import pytest

from gpustackd.domain.lifecycle import PLACED, TAKEN, WAITING, InstanceState, lawful

# x: lawful; c: only with the placement cleared and the epoch raised in the same write; =: no move at all
TABLE = """
              PENDING ANALYZING SCHEDULED INITIALIZING DOWNLOADING STARTING RUNNING ERROR UNREACHABLE
PENDING       =       x         .         .            .           .        .       .     .
ANALYZING     x       =         x         .            .           .        .       x     .
SCHEDULED     c       .         =         x            x           x        x       x     x
INITIALIZING  c       .         .         =            x           x        x       x     x
DOWNLOADING   c       .         .         .            =           x        x       x     x
STARTING      c       .         .         .            .           =        x       x     x
RUNNING       c       .         .         .            .           .        =       x     x
ERROR         c       .         x         .            .           .        .       =     .
UNREACHABLE   c       .         .         x            x           x        x       x     =
"""


def moves() -> dict[tuple[InstanceState, InstanceState], str]:
    head, *rows = TABLE.strip("\n").splitlines()
    columns = [InstanceState(name) for name in head.split()]
    found = {}
    for row in rows:
        name, *marks = row.split()
        found |= {(InstanceState(name), new): mark for new, mark in zip(columns, marks, strict=True)}
    return found


def test_the_table_names_every_pair_of_states() -> None:
    assert set(moves()) == set(product(InstanceState, InstanceState))


@pytest.mark.parametrize(("old", "new"), list(product(InstanceState, InstanceState)), ids=str)
def test_a_move_is_lawful_exactly_where_the_contract_says(old: InstanceState, new: InstanceState) -> None:
    mark = moves()[old, new]
    assert lawful(old, new) == (mark in "x=")
    assert lawful(old, new, placement_cleared=True) == (mark in "x=c")


def test_every_state_but_error_says_whether_it_holds_a_placement() -> None:
    assert set(InstanceState) - {InstanceState.ERROR} == WAITING | PLACED
    assert not WAITING & PLACED


def test_every_state_can_get_back_to_pending_and_from_there_to_running() -> None:
    for start in InstanceState:
        seen, todo = {start}, [start]
        while todo:
            old = todo.pop()
            reached = [
                new for new in InstanceState if new not in seen and lawful(old, new, placement_cleared=True)
            ]
            seen.update(reached)
            todo.extend(reached)
        assert seen == set(InstanceState), start


def test_a_worker_reports_its_states_in_their_order_and_may_skip_some() -> None:
    for first, later in product(TAKEN, TAKEN):
        assert lawful(first, later) == (TAKEN.index(later) >= TAKEN.index(first))
