"""Says what the demonstration does while it does it, and keeps what did not hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

_ERASE = Control((ControlType.ERASE_IN_LINE, 2), ControlType.CARRIAGE_RETURN)


class Narration:
    """Steps with the time they took, findings that hold or do not."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.began = time.perf_counter()
        self.failures: list[str] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began

    @contextmanager
    def step(self, doing: str) -> Iterator[list[str]]:
        """A step; what is put into the list is said behind it. A terminal sees it as it begins."""
        began = time.perf_counter()
        notes: list[str] = []
        live = sys.stdout.isatty()
        if live:
            self.out.print(f"  …       {doing}", markup=False, end="\r")
        yield notes
        took = time.perf_counter() - began
        said = f"{doing}: {'; '.join(notes)}" if notes else doing
        if live:
            self.out.control(_ERASE)
        self.out.print(f"  {took:5.2f} s {said}", markup=False)

    def say(self, text: str = "", *, style: str = "") -> None:
        self.out.print(text, style=style, markup=False)

    def finding(self, holds: bool, text: str) -> None:
        """Something that must hold; the demonstration fails where it does not."""
        mark, style = ("ok  ", "green") if holds else ("FAIL", "red")
        self.out.print(f"  {mark}", style=style, end=" ")
        self.out.print(text, markup=False)
        if not holds:
            self.failures.append(text)
