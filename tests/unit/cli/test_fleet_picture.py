"""The picture of the fleet: legible in 100 columns, plain where no person looks."""

from typing import Any

import pytest

from gpustackd.cli.fleet_picture import bar, legend, picture
from gpustackd.cli.output import console

GIB = 2**30


def worker(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": "READY", "unified_memory": False, "over_committed": False, **more}


def gpu(host: str, index: int, *holders: str, used: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "worker": host, "type": "cuda", "index": index, "name": "NVIDIA H100", "vram_total": 80 * GIB,
        "capacity": 80 * GIB, "vram_allocated": used * GIB, "open": True, "over_committed": False,
        "instances": [{"name": n, "model": n.rpartition("-")[0]} for n in holders], **more,
    }  # fmt: skip


def test_each_card_is_a_bar_with_who_sits_on_it() -> None:
    cards = [gpu("w1", 0, "llama-8b-1", used=40), gpu("w1", 1), gpu("w1", 2, "a-1", "b-1", "c-1", used=80)]
    head, line = picture([worker("w1")], cards).plain.splitlines()
    assert head == "w1              3 x NVIDIA H100 80 GiB"
    assert line.split() == ["██··", "llama-8b-1", "····", "free", "████", "a-1+2"]


def test_every_line_fits_into_100_columns_whatever_the_names() -> None:
    workers = [worker("a-machine-with-a-very-long-name-indeed"), worker("w2", state="MAINTENANCE")]
    cards = [
        gpu(w["name"], n, f"qwen3-embedding-0.6b-instruct-{n}", "another-1", used=n * 9)
        for w in workers
        for n in range(8)
    ]
    lines = picture(workers, cards).plain.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert len(lines) == 6  # a heading and two lines of four cards for each
    assert "MAINTENANCE" in lines[3]


def test_a_shortened_name_keeps_the_end_that_tells_it_apart() -> None:
    cards = [gpu("w", n, f"qwen3-embedding-0.6b-{n}", used=1) for n in range(3)]
    line = picture([worker("w")], cards).plain.splitlines()[1]
    assert [word[-2:] for word in line.split() if "…" in word] == ["-0", "-1", "-2"]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "····"), (0.001, "▏···"), (0.5, "██··"), (0.9, "███▋"), (1, "████"), (1.7, "████")],
)
def test_a_bar_shows_anything_above_nothing(share: float, expected: str) -> None:
    assert bar(share) == expected


def test_unknown_memory_closed_cards_and_marks_are_shown() -> None:
    cards = [gpu("w", 0, capacity=None, vram_total=None), gpu("w", 1, open=False)]
    text = picture([worker("w", over_committed=True, unified_memory=True)], cards).plain
    assert "????" in text
    assert "closed" in text
    assert "OVER-COMMITTED" in text
    assert "one pool with its RAM" in text


def test_a_worker_without_gpus_is_shown_too() -> None:
    assert picture([worker("cpu-only")], []).plain == "cpu-only        no GPUs\n"


def test_no_colour_goes_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(picture([worker("w")], [gpu("w", 0, "m-1", used=8)]))
    assert "\x1b" not in capsys.readouterr().out


def test_the_legend_counts_cards_and_open_memory() -> None:
    cards = [gpu("w", 0, "m-1", used=40), gpu("w", 1), gpu("w", 2, capacity=None)]
    assert legend(cards) == "1 of 2 cards in use, 25 % of the open memory booked"
    assert legend([]) == "0 of 0 cards in use, none of the open memory booked"
