"""`explain` as data and as text, from rows as the inventory gives them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpustackd.cli.explain import explanation, why_it_won
from gpustackd.cli.explain_text import show
from gpustackd.cli.output import console

PLACED = {
    "name": "i1", "model": "m", "state": "RUNNING", "state_message": None, "attempts": 2, "worker": "w1",
    "gpu_type": "cuda", "gpu_indexes": [0, 1], "vram": 2**31, "ram": 0, "reasons": [],
    "next_attempt_at": None, "scheduled_at": "2026-01-01T00:00:02+00:00",
    "subordinates": [{"worker_name": "w2", "gpu_type": "cuda", "gpu_indexes": [3]}],
}  # fmt: skip
WAITING = {
    **PLACED, "state": "PENDING", "worker": None, "gpu_type": None, "gpu_indexes": [], "subordinates": [],
    "state_message": "No place among 3 workers:\n- 3 workers do not match worker_selector (zone=a)",
    "reasons": [{"code": "labels", "filter": "labels"}], "next_attempt_at": "2026-01-01T00:01:00+00:00",
}  # fmt: skip


def decision(outcome: str, **more: Any) -> dict[str, Any]:
    return {
        "outcome": outcome, "attempt": 1, "replica": "r1", "created_at": "2026-01-01T00:00:01.5+00:00",
        "duration_ms": 0.5, "pool": [{"filter": "labels", "kept": 2, "total": 3}], "candidates": None, **more,
    }  # fmt: skip


def text_of(answer: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    show(console(), answer)
    return capsys.readouterr().out


def test_a_placed_instance_shows_its_place_and_what_it_was_chosen_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    candidates = [
        {"worker": "w1", "gpus": 2, "score": 95.5, "parts": {"placement": 95, "locality": 0.5}},
        {"worker": "w3", "gpus": 1, "score": 40},
    ]
    answer = explanation(PLACED, [decision("PLACED", candidates=candidates), decision("NO_FIT")])
    assert answer["waiting"] is None
    assert answer["placement"]["place"] == "w1 cuda:0,1 + w2 cuda:3"
    assert [h["outcome"] for h in answer["history"]] == ["PLACED", "NO_FIT"]
    text = text_of(answer, capsys)
    assert "i1, an instance of m, is RUNNING on w1 cuda:0,1 + w2 cuda:3" in text
    assert "holds 2.0 GiB of VRAM on 3 GPUs" in text
    assert "decided by r1 at 2026-01-01 00:00:01" in text
    assert "1. w1 2 GPUs  score 95.5  (placement 95, locality 0.5)" in text
    assert "labels  2 of 3" in text


def test_an_instance_that_failed_shows_what_was_reported_and_what_comes_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = {
        **PLACED, "state": "ERROR", "state_message": "CUDA out of memory", "failures": 2, "restart_count": 1,
        "restart_on_error": True, "draining_since": None,
    }  # fmt: skip
    text = text_of(explanation(failed, []), capsys)
    assert "i1, an instance of m, is ERROR on w1" in text
    assert "\n  CUDA out of memory\n" in text
    assert "failed here 2 times, restarted once" in text
    assert "it will be restarted here or placed elsewhere" in text
    text = text_of(explanation({**failed, "restart_on_error": False}, []), capsys)
    assert "it is not restarted: its model has restart_on_error = false" in text
    drains = {**PLACED, "draining_since": "2026-01-01T00:00:09+00:00"}
    assert "draining since 2026-01-01 00:00:09 UTC" in text_of(explanation(drains, []), capsys)


def test_a_waiting_instance_shows_reasons_pool_and_when_it_is_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = explanation(WAITING, [decision("NO_FIT")], now=datetime(2026, 1, 1, tzinfo=UTC))
    assert answer["placement"] is None
    assert answer["waiting"]["reasons"] == WAITING["reasons"]
    text = text_of(answer, capsys)
    assert "- 3 workers do not match worker_selector (zone=a)" in text
    assert "Next try at 2026-01-01 00:01:00 UTC" in text


def test_an_instance_that_nobody_looked_at_points_at_the_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    answer = explanation({**WAITING, "state_message": None, "reasons": [], "next_attempt_at": None}, [])
    assert "is one running?" in text_of(answer, capsys)


def test_what_is_like_markup_in_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    answer = explanation({**WAITING, "name": "[red]x[/]"}, [])
    assert "[red]x[/], an instance of m" in text_of(answer, capsys)


def test_layers_that_stay_in_ram_are_told_with_what_keeps_them_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = "22 of 33 layers on GPUs: the next one needs 1.00 GiB, and no more than 0.75 GiB is left"
    candidates = [{"worker": "w1", "gpus": 1, "score": 100, "offload_layers": 22, "limit": limit}]
    text = text_of(explanation(PLACED, [decision("PLACED", candidates=candidates)]), capsys)
    assert "22 of 33 layers on GPUs" in text
    assert "0.75 GiB is left" in " ".join(text.split())


def test_a_time_that_has_passed_is_not_told_as_the_next_try() -> None:
    late = explanation(WAITING, [decision("NO_FIT")], now=datetime(2026, 2, 1, tzinfo=UTC))
    assert late["waiting"]["next_attempt_at"] is None
    assert late["waiting"]["tried_again"].endswith("at every rescan")


def test_the_winner_is_told_with_what_it_is_ahead_by() -> None:
    candidates = [
        {"worker": "w1", "score": 95.5, "parts": {"placement": 90.5, "locality": 5}},
        {"worker": "w3", "score": 92, "parts": {"placement": 92}},
    ]
    assert why_it_won(candidates) == "w1 is 3.5 ahead of w3 (locality +5, placement -1.5)"
    assert why_it_won(candidates[:1]) == "w1 was the only candidate"
    even = why_it_won([candidates[0], {**candidates[0], "worker": "w2"}])
    assert even is not None
    assert even.startswith("w1 and 1 more have the same score")
    assert why_it_won([]) is None
