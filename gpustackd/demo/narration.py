"""Says what the demo does while it does it, and remembers what did not hold."""

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
    """Steps with the time they took, and checks that hold or do not; `failures` are those that do not."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.began = time.perf_counter()
        self.failures: list[str] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    @contextmanager
    def step(self, doing: str) -> Iterator[list[str]]:
        """A step; what is put into the list is printed after its name. A terminal shows it as it begins."""
        began = time.perf_counter()
        notes: list[str] = []
        live = sys.stdout.isatty()
        if live:
            self.out.print(f"  …       {doing}", markup=False, end="\r")
        yield notes
        took = time.perf_counter() - began
        line = f"{doing}: {'; '.join(notes)}" if notes else doing
        if live:
            self.out.control(_ERASE)
        self.out.print(f"  {took:5.2f} s {line}", markup=False)

    def say(self, text: str = "", *, style: str = "") -> None:
        """A line as it is."""
        self.out.print(text, style=style, markup=False)

    def check(self, holds: bool, text: str) -> None:
        """Something that must hold; the demo fails where it does not."""
        mark, style = ("ok  ", "green") if holds else ("FAIL", "red")
        self.out.print(f"  {mark}", style=style, end=" ")
        self.out.print(text, markup=False)
        if not holds:
            self.failures.append(text)
