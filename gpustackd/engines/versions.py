"""Versions of engines and runtimes: which are the same, which a pin admits, which is newer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpustackd.errors import BadRow

Key = tuple[Any, ...]

_PADDED = 16
_DIGITS = 18
"""Longer numbers are no part of a version, and slow to read."""
_ZERO = (3, 0, "")
_STAGES = {"alpha": 0, "beta": 1, "rc": 2}
_PART = re.compile(r"(alpha|beta|rc)([0-9]{0,18})(.*)\Z", re.DOTALL)


@lru_cache(maxsize=4096)
def order(version: str) -> Key:
    """Key by which the workers order versions: one leading `v` is dropped, `-`, `_` and
    `+` act as dots; alpha < beta < rc < integers < other text, by code points; the shorter one counts as
    filled up with zeros."""
    parts = [_part(p) for p in re.split(r"[-_+.]", version.strip().lower().removeprefix("v"))]
    return (*parts, *(_ZERO for _ in range(_PADDED - len(parts))))


def _part(text: str) -> tuple[int, int, str]:
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS:
        return (3, int(text), "")
    stage = _PART.match(text)
    if stage is not None:
        return (_STAGES[stage[1]], int(stage[2] or 0), stage[3])
    return (4, 0, text)


def major(version: str) -> Any:
    """The first part of a version."""
    return order(version)[0]


_PEP_440 = re.compile(
    r"""v?(?:(?P<epoch>\d{1,18})!)?(?P<release>\d{1,18}(?:\.\d{1,18})*)
    (?:[-_.]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre_n>\d{0,18}))?
    (?:-(?P<post_bare>\d{1,18})|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d{0,18}))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d{0,18}))?
    (?:\+(?P<local>[a-z0-9]{1,18}(?:[-_.][a-z0-9]{1,18})*))?\Z""",
    re.VERBOSE | re.ASCII,
)
_LETTERS = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}


@lru_cache(maxsize=4096)
def pep_440(version: str) -> Key | None:
    """Key of the ordering of PEP 440, equal for spellings of one version; None where it is none."""
    m = _PEP_440.match(version.strip().lower())
    if m is None:
        return None
    release = tuple(int(n) for n in m["release"].split("."))
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    after = m["post_bare"] or (m["post"] and (m["post_n"] or 0))
    post = -1 if after is None else int(after)
    dev = (0, int(m["dev_n"] or 0)) if m["dev"] else (1, 0)
    if m["pre"]:
        pre = (1, _LETTERS.get(m["pre"], m["pre"]), int(m["pre_n"] or 0))
    else:  # a development release of a version comes before its pre-releases
        pre = (0 if m["dev"] and post < 0 else 2, "", 0)
    local = tuple(
        (1, int(p), "") if p.isdigit() else (0, 0, p) for p in re.split(r"[-_.]", m["local"] or "") if p
    )
    return (int(m["epoch"] or 0), release, pre, post, dev, local)


def same(one: str, other: str) -> bool:
    """Whether two texts name one version."""
    return canonical(one) == canonical(other)


def canonical(version: str) -> Key | str:
    """Equal for all spellings of a version; what is no version of PEP 440 is compared as text."""
    return pep_440(version) or version.strip().casefold().removeprefix("v")


_COMPARISONS: Mapping[str, Callable[[Key, Key], bool]] = {
    "==": lambda v, w: v == w,
    "!=": lambda v, w: v != w,
    ">=": lambda v, w: v >= w,
    "<=": lambda v, w: v <= w,
    ">": lambda v, w: v > w,
    "<": lambda v, w: v < w,
}
_CLAUSE = re.compile(r"\s*(==|!=|~=|>=|<=|>|<)\s*([^\s,]+)\s*\Z")


@dataclass(frozen=True, slots=True)
class Pin:
    """What a model's `backend_version` admits: one version, or a range (`>=0.11, <0.13`)."""

    text: str
    clauses: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Pin:
        """Raise BadRow naming the part of a range that cannot be read."""
        text = text.strip()
        if not re.search(r"[<>=!~]", text):
            return cls(text)
        return cls(text, tuple(_clause(part) for part in text.split(",")))

    def admits(self, version: str) -> bool:
        """Whether the version is the one named, or within the range."""
        if not self.clauses:
            return same(self.text, version)
        return all(_holds(operator, bound, version) for operator, bound in self.clauses)

    def __str__(self) -> str:
        return self.text


def _clause(part: str) -> tuple[str, str]:
    found = _CLAUSE.match(part)
    if found is None or pep_440(found[2].removesuffix(".*")) is None:
        raise BadRow("backend_version", f"{part.strip()!r} is no version, nor a range such as >=0.11,<0.13")
    return found[1], found[2]


def _holds(operator: str, bound: str, version: str) -> bool:
    key = pep_440(version)
    if key is None:
        return False
    if bound.endswith(".*"):
        start = pep_440(bound[:-2])
        assert start is not None
        inside = _release(version, len(bound[:-2].split("."))) == _release(bound[:-2])
        return inside if operator == "==" else not inside if operator == "!=" else False
    limit = pep_440(bound)
    assert limit is not None
    if operator == "~=":
        stem = _release(bound)[:-1]
        return key >= limit and _release(version, len(stem)) == stem
    return _COMPARISONS[operator](key, limit)


def _release(version: str, length: int | None = None) -> tuple[int, ...]:
    """Numbers of the release as written, cut or filled up with zeros to a length."""
    m = _PEP_440.match(version.strip().lower())
    assert m is not None
    numbers = tuple(int(n) for n in m["release"].split("."))
    return numbers if length is None else (*numbers, *([0] * length))[:length]
