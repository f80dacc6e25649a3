"""One "Do better" note of the specifications, and what it is to us."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a note is to us."""

    MEND = "mend"
    PREFER = "prefer"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Note:
    """`code` is spec, section and subject; `where` the module that follows it, or the setting."""

    code: str
    kind: Kind
    what: str
    where: str = ""
