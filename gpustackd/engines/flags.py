"""Reads `backend_parameters`: the command line of an engine as names and values.

The list forms one argument vector. Names are compared without leading dashes and with `_` read as `-`.
The last occurrence of a flag wins, as in the engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from gpustackd.errors import BadRow

COLUMN = "backend_parameters"

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")
_WHOLE = re.compile(r"[+-]?\d{1,18}\Z", re.ASCII)
_NO = frozenset({"0", "false", "no", "off", "f", "n"})
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as written: `name` without dashes and underscores, `value` None where it is bare."""

    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class BackendParameters:
    """The flags of one command line, in their order."""

    flags: tuple[Flag, ...] = ()

    def text(self, *names: str) -> str | None:
        """Last value of the flag under any of its names; None where it is absent or always bare."""
        values = self.values(*names)
        return values[-1] if values else None

    def values(self, *names: str) -> list[str]:
        """All values of the flag under any of its names, in order."""
        wanted = _names(names)
        return [f.value for f in self.flags if f.name in wanted and f.value is not None]

    def integer(self, *names: str) -> int | None:
        """Whole number given; None where the flag is absent.

        Raises BadRow naming flag and value where it is not a whole number.
        """
        raw = self.text(*names)
        if raw is None:
            return None
        if not _WHOLE.match(raw.strip()):
            raise BadRow(COLUMN, f"--{names[0]} is {_short(raw)}, not a whole number")
        return int(raw)

    def number(self, *names: str) -> float | None:
        """Number given; None where absent. Raises BadRow where it is not a finite number."""
        raw = self.text(*names)
        if raw is None:
            return None
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not abs(value) < float("inf"):
            raise BadRow(COLUMN, f"--{names[0]} is {_short(raw)}, not a number")
        return value

    def flag(self, *names: str) -> bool:
        """Whether a boolean flag is on: bare or any value but 0, false, no, off, f, n; `--no-x` is off."""
        wanted = _names(names)
        negative = frozenset(f"no-{n}" for n in wanted)
        found = [f for f in self.flags if f.name in wanted or f.name in negative]
        if not found:
            return False
        chosen = found[-1]
        on = chosen.value is None or chosen.value.strip().lower() not in _NO
        return on != (chosen.name in negative)

    def has(self, *names: str) -> bool:
        """Whether the flag occurs at all, bare or with a value."""
        wanted = _names(names)
        return any(f.name in wanted for f in self.flags)


def parse_flags(parameters: Iterable[str]) -> BackendParameters:
    """Read the list. Raises BadRow where quotes do not close."""
    return _parse(tuple(parameters))


@lru_cache(maxsize=4096)
def _parse(parameters: tuple[str, ...]) -> BackendParameters:
    tokens = [t for element in parameters for t in _tokens(element)]
    flags: list[Flag] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not is_key(token):
            continue
        name, equals, value = token.lstrip("-").partition("=")
        if equals:
            flags.append(Flag(_canonical(name), value))
        elif at < len(tokens) and not is_key(tokens[at]):
            flags.append(Flag(_canonical(name), tokens[at]))
            at += 1
        else:
            flags.append(Flag(_canonical(name), None))
    return BackendParameters(tuple(flags))


def is_key(word: str) -> bool:
    """Whether a word names a flag: a dash and more, but neither `--` alone nor a negative number."""
    return len(word) > 1 and word[0] == "-" and word != "--" and not _NUMBER.match(word)


def _canonical(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(_canonical(n) for n in names)


def _short(raw: str) -> str:
    return repr(raw if len(raw) <= 60 else raw[:57] + "...")


def _tokens(element: str) -> Iterator[str]:
    """Words of one element; an element that does not begin with a flag is one word, whatever it holds."""
    text = element.replace("\\\r\n", " ").replace("\\\n", " ").strip()
    if text.endswith("\\"):  # a continuation whose line break was lost when the list was written
        text = text[:-1].rstrip()
    if not text:
        return
    first = text.split(None, 1)[0]
    if not is_key(first):
        yield element.strip()
        return
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        word, at = _word(text, at)
        yield word


def _word(text: str, at: int) -> tuple[str, int]:
    """The shell word that begins at `at` and where it ends; JSON in it is kept whole with its quotes."""
    out: list[str] = []
    start_of_value = True
    while at < len(text) and not text[at].isspace():
        c = text[at]
        if start_of_value and c in "{[":
            end = _json_end(text, at)
            if end is not None:
                out.append(text[at:end])
                at = end
                start_of_value = False
                continue
        start_of_value = c == "=" and "=" not in out
        if c in "'\"":
            quoted, at = _quoted(text, at)
            out.append(quoted)
        elif c == "\\" and at + 1 < len(text):
            out.append(text[at + 1])
            at += 2
        else:
            out.append(c)
            at += 1
    return "".join(out), at


def _json_end(text: str, at: int) -> int | None:
    try:
        _, end = _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return end


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote = text[at]
    out: list[str] = []
    i = at + 1
    while i < len(text):
        c = text[i]
        if c == quote:
            return "".join(out), i + 1
        if c == "\\" and quote == '"' and i + 1 < len(text) and text[i + 1] in '"\\$`':
            out.append(text[i + 1])
            i += 2
            continue
        out.append(c)
        i += 1
    raise BadRow(COLUMN, f"a quote in {_short(text)} does not close", "close it, or write it as two elements")
