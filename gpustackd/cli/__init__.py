"""The command line `gpustackd`: one file per command, a clear word for every mistake."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """The entry point. Loading all parts takes a second or more on a busy machine, so what a person or a
    service manager sends meanwhile is answered here: nothing is under way yet, the end is an orderly one."""
    try:
        if "run" in sys.argv[1:2]:
            signal.signal(signal.SIGTERM, _nothing_under_way)
        from gpustackd.cli.program import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)


def _nothing_under_way(_: int, __: FrameType | None) -> None:
    sys.exit(0)


__all__ = ["main"]
