"""Log lines: structlog events as JSON, or as text in a terminal, with fields in one order and no secrets.

Lines of libraries that use the standard library's logging come out in the same form, as `library.message`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from gpustackd.observe.lines import LineWriter
from gpustackd.redaction import MASK, SECRET_MARKS, is_secret_name, mask_text

Log = FilteringBoundLogger
Format = Literal["auto", "json", "text"]

FIELDS = (
    "timestamp", "level", "event", "replica", "instance", "instance_id", "model", "attempt", "worker", "gpus",
    "reason", "duration_ms",
)  # fmt: skip
"""The order of fields on a line; others follow as they were given. Fields without a value are left out."""

_LONGEST = 4_000
"""Characters of one value; labels may hold a megabyte."""
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_QUIET = logging.WARNING


@dataclass(frozen=True, slots=True)
class Logging:
    """Logging that has been started: `log` for every part, `close` at the very end."""

    log: Log
    writer: LineWriter
    handler: logging.Handler
    root_level: int

    def close(self) -> None:
        """Write what waits and detach from the standard library's logging. Later lines are dropped."""
        root = logging.getLogger()
        root.removeHandler(self.handler)
        root.setLevel(self.root_level)
        logging.captureWarnings(False)
        self.writer.close()


def start_logging(
    *,
    level: str = "info",
    form: Format = "auto",
    replica: str | None = None,
    stream: TextIO | None = None,
) -> Logging:
    """Start logging to a stream with a file descriptor (None = stdout), and route the standard library's
    logging there. `form` auto = text in a terminal, else JSON. `structlog.get_logger()` gives the same."""
    stream = stream or sys.stdout
    stream.flush()
    threshold = _LEVELS[level]
    terminal = stream.isatty()
    as_text = form == "text" or (form == "auto" and terminal)
    prepare = _Prepare()
    dropped: dict[str, Any] = {"event": "log.dropped"} | ({"replica": replica} if replica else {})
    render = _Render(_text(terminal and not os.environ.get("NO_COLOR")) if as_text else _json())
    writer = LineWriter(
        stream.fileno(),
        lambda count: render(None, "", prepare(None, "warning", {**dropped, "count": count})),
    )
    settings: dict[str, Any] = {
        "processors": [_with_traceback, prepare, render],
        "wrapper_class": structlog.make_filtering_bound_logger(threshold),
        "context_class": dict,
    }
    structlog.configure(**settings, logger_factory=lambda *_: _Sink(writer), cache_logger_on_first_use=False)
    log = cast("Log", structlog.wrap_logger(_Sink(writer), **settings, cache_logger_on_first_use=True))
    log = log.bind(**({"replica": replica} if replica else {}))
    handler = _LibraryLines(log)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(threshold if threshold < logging.INFO else max(threshold, _QUIET))
    logging.captureWarnings(True)
    return Logging(log, writer, handler, before)


class _Sink:
    """The end of the chain: each level's method takes the finished line."""

    def __init__(self, writer: LineWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = self.msg = writer.write
        self.exception = self.fatal = self.warn = writer.write


def _with_traceback(log: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hardly any line has one to format."""
    return structlog.processors.format_exc_info(log, method, event) if "exc_info" in event else event


class _Prepare:
    """Adds time and level, orders the fields, hides secrets, cuts long values."""

    def __call__(self, _: Any, method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        moment = datetime.now(UTC).isoformat(timespec="microseconds")
        event["timestamp"] = moment.removesuffix("+00:00") + "Z"
        event["level"] = "error" if method == "exception" else method
        line: dict[str, Any] = {}
        for name in FIELDS:
            value = event.pop(name, None)
            if value is not None:
                line[name] = _plain(name, value)
        for name, value in event.items():
            if value is not None:
                line[name] = _clean(name, value)
        return line


class _Render:
    """The line as text. Secrets inside values are rare: the line is searched, then masked value by value."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        self._render = render

    def __call__(self, _: Any, __: str, line: MutableMapping[str, Any]) -> str:
        text = self._render(dict(line))
        if any(mark in text for mark in SECRET_MARKS):
            return self._render({name: _masked(value) for name, value in line.items()})
        return text


def _json() -> Callable[[dict[str, Any]], str]:
    """One JSON object a line, compact, always valid."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

    def render(line: dict[str, Any]) -> str:
        text = encode(line)
        return text if text.isascii() else text.translate(_LINE_BREAKS)

    return render


_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""JSON leaves these as they are, but many readers take them for the end of a line."""


def _text(colours: bool) -> Callable[[dict[str, Any]], str]:
    console = structlog.dev.ConsoleRenderer(
        colors=colours, sort_keys=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
    )
    return lambda line: str(console(None, "", line))


def _clean(name: str, value: Any) -> Any:
    """As `_plain`, with the values of secret names hidden."""
    return MASK if is_secret_name(name) else _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    """A value fit for JSON: plain types, long text cut, no NaN."""
    kind = type(value)
    if kind is str:
        return value if len(value) <= _LONGEST else _cut(value)
    if kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return (round(value, 3) if name == "duration_ms" else value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain("", v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _clean(str(k), v) for k, v in value.items()}
    if hasattr(value, "item") and hasattr(value, "dtype"):  # a NumPy scalar
        return _plain(name, value.item())
    try:
        return _cut(str(value))
    except Exception:  # a broken __str__ must not lose the line
        return f"<{kind.__name__}>"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more)"


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return {name: _masked(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_masked(v) for v in value]
    return value


class _LibraryLines(logging.Handler):
    """Lines of the standard library's logging, in the same form."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: a bad format string of a library must not stop the daemon."""
        try:
            message = record.getMessage()
        except Exception:
            message = str(record.msg)
        level = min(40, max(10, record.levelno // 10 * 10))
        self._log.log(
            level, "library.message", logger=record.name, message=message, exc_info=record.exc_info or None
        )
