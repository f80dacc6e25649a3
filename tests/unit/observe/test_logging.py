"""Log lines: their form, their order, what they hide, and that nobody waits for them."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import SecretStr

from gpustackd.observe.lines import LineWriter
from gpustackd.observe.logging import FIELDS, Logging, start_logging
from tests.exploring import explored

Start = Callable[..., Logging]


class Output:
    """A file that log lines go to, read back after the writer has been closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream = path.open("w", encoding="utf-8")
        self.started: list[Logging] = []

    def start(self, **options: Any) -> Logging:
        self.started.append(start_logging(stream=self.stream, **options))
        return self.started[-1]

    def text(self) -> str:
        for one in self.started:
            one.close()
        return self.path.read_text("utf-8")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.text().splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    made = Output(tmp_path / "log")
    yield made
    made.text()
    made.stream.close()
    structlog.reset_defaults()


def test_fields_stand_in_the_order_of_the_contract_and_others_follow(output: Output) -> None:
    log = output.start(replica="r1").log
    log.info(
        "instance.scheduled",
        score=1, duration_ms=1.23456, reason="fits", gpus=[0, 1], worker="w", attempt=1, model="m",
        instance_id=7, instance="m-1", strategy="spread",
    )  # fmt: skip
    (line,) = output.lines()
    assert list(line) == [*FIELDS, "score", "strategy"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["replica"], line["duration_ms"]) == ("info", "r1", 1.235)


def test_fields_without_a_value_are_left_out(output: Output) -> None:
    output.start().log.info("rescan.done", worker=None, found=0)
    (line,) = output.lines()
    assert list(line) == ["timestamp", "level", "event", "found"]


def test_lines_below_the_level_are_not_written(output: Output) -> None:
    log = output.start(level="warning").log
    log.info("instance.enqueued")
    log.warning("placement.conflict")
    log.error("database.lost")
    assert [line["level"] for line in output.lines()] == ["warning", "error"]


def test_a_logger_got_from_structlog_writes_to_the_same_place(output: Output) -> None:
    output.start()
    structlog.get_logger().info("daemon.started", version="1")
    assert output.lines()[0]["event"] == "daemon.started"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError


def test_whatever_is_logged_the_line_is_one_json_object(output: Output) -> None:
    output.start().log.info(
        "row.bad",
        reason="two\nlines \u2028 \x85 \udc80 \x00 é",
        nan=float("nan"), inf=float("inf"), number=np.int64(5), share=np.float64("nan"), parts={1: {2}},
        broken=Broken(), raw=b"\xff", long="x" * 1_000_000,
    )  # fmt: skip
    (line,) = output.lines()
    assert line["reason"].startswith("two\nlines ")
    assert (line["nan"], line["inf"], line["number"], line["share"]) == ("nan", "inf", 5, "nan")
    assert (line["parts"], line["broken"]) == ({"1": [2]}, "<Broken>")
    assert len(line["long"]) < 5_000


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)


@explored(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.text(min_size=1).filter(lambda k: k != "event"), json_like, max_size=4))
def test_no_field_breaks_a_line(fields: dict[str, Any], tmp_path: Path) -> None:
    output = Output(tmp_path / "log")
    output.start().log.info("row.bad", **fields)
    assert output.lines()[0]["event"] == "row.bad"
    output.stream.close()


def test_secrets_are_never_written(output: Output) -> None:
    output.start().log.error(
        "database.lost",
        reason="cannot reach postgresql://u:hunter2@h/db",
        worker_token="hunter2",
        headers={"Authorization": "Bearer hunter2hunter2", "Accept": "*/*"},
        sent="Bearer hunter2hunter2",
        urls=["https://u:hunter2@hub/x?token=hunter2"],
        setting=SecretStr("hunter2"),
        tokens_per_second=5,
    )
    text = output.text()
    assert "hunter2" not in text
    assert json.loads(text)["headers"] == {"Authorization": "***", "Accept": "*/*"}
    assert json.loads(text)["tokens_per_second"] == 5


def test_an_exception_is_told_in_its_line_without_its_secrets(output: Output) -> None:
    log = output.start().log
    try:
        raise OSError("postgresql://u:hunter2@h/db is down")
    except OSError:
        log.exception("daemon.failed")
    (line,) = output.lines()
    assert line["level"] == "error"
    assert "OSError: postgresql://u:***@h/db is down" in line["exception"]


def test_lines_of_libraries_come_in_the_same_form(output: Output) -> None:
    output.start(replica="r1")
    library = logging.getLogger("some.library")
    library.info("chatter")
    library.warning("slow %s", "postgresql://u:hunter2@h/db")
    bad = library.makeRecord("some.library", logging.ERROR, "x.py", 1, "bad format %d", ("x",), None)
    output.started[0].handler.handle(bad)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    lines = output.lines()
    assert [line["event"] for line in lines] == ["library.message"] * 3
    assert (lines[0]["logger"], lines[0]["message"]) == ("some.library", "slow postgresql://u:***@h/db")
    assert (lines[0]["level"], lines[0]["replica"]) == ("warning", "r1")
    assert lines[1]["message"] == "bad format %d"
    assert "UserWarning: old" in lines[2]["message"]


def test_debug_lets_libraries_talk(output: Output) -> None:
    output.start(level="debug")
    logging.getLogger("some.library").debug("chatter")
    assert output.lines()[0]["message"] == "chatter"


def test_closing_leaves_the_standard_librarys_logging_as_it_was(output: Output) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    output.start()
    output.text()
    assert (root.level, list(root.handlers)) == before


def test_a_terminal_gets_text_and_a_pipe_gets_json() -> None:
    for opened, form in [(os.openpty, "text"), (os.pipe, "json")]:
        ends = opened()
        reader, writer = ends if form == "text" else (ends[0], ends[1])
        with os.fdopen(writer, "w") as stream:
            started = start_logging(stream=stream)
            started.log.info("daemon.started", version="1")
            started.close()
            first = os.read(reader, 1000).decode()
        os.close(reader)
        assert first.startswith("{") == (form == "json")
        assert "daemon.started" in first
    structlog.reset_defaults()


def test_text_has_no_colours_outside_a_terminal(output: Output) -> None:
    output.start(form="text").log.info("daemon.started", version="1", replica="r1")
    text = output.text()
    assert "\x1b" not in text
    assert "daemon.started replica=r1 version=1" in text


def test_a_reader_that_stops_reading_costs_lines_not_time() -> None:
    reader, pipe = os.pipe()
    writer = LineWriter(pipe, lambda count: f"dropped {count}", limit=100)
    total = 2_000
    for number in range(
        total
    ):  # far more than the pipe and the buffer hold: this would never end if it waited
        writer.write(f"{number} " + "x" * 1_000)
    assert writer.dropped > 0
    with os.fdopen(reader, "rb") as lines:
        told = 0
        seen: list[int] = []
        while not told:
            word, _, rest = lines.readline().decode().partition(" ")
            if word == "dropped":
                told = int(rest)
            else:
                seen.append(int(word))
        writer.write("last line")
        os.set_blocking(reader, True)
        writer.close()
        os.close(pipe)
        seen += [int(line.split()[0]) for line in lines if line[:1].isdigit()]
    assert told == writer.dropped == total - len(seen)
    assert seen == sorted(seen)


def test_a_reader_that_is_gone_does_no_harm() -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    writer = LineWriter(pipe, str)
    writer.write("into the void")
    writer.close()
    os.close(pipe)
    assert writer.dropped == 1


def test_a_line_after_the_close_is_counted_not_written() -> None:
    reader, pipe = os.pipe()
    writer = LineWriter(pipe, str)
    writer.write("first")
    writer.close()
    writer.write("late")
    os.close(pipe)
    with os.fdopen(reader, "rb") as lines:
        assert lines.read() == b"first\n"
    assert writer.dropped == 1
