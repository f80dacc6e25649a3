"""What a person sees of an error: one sentence, what to do next, and an exit code."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

from gpustackd.errors import GpustackdError
from gpustackd.redaction import mask_text

UNEXPECTED = 1

_tracebacks = False


def show_tracebacks(wanted: bool) -> None:
    """Whether `tell` shows where an error arose (`--debug`, or log level debug)."""
    global _tracebacks  # noqa: PLW0603 - an option of the process
    _tracebacks = wanted or os.environ.get("GPUSTACKD_LOG_LEVEL", "").strip().lower() == "debug"


def tell(error: BaseException) -> int:
    """Print an error on stderr and return the exit code that stands for it."""
    if _tracebacks:
        print(_where(error), file=sys.stderr, end="")
    group = error
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]  # a task group wraps even a single one
    if isinstance(group, GpustackdError):
        print(f"gpustackd: {mask_text(group.problem)}", file=sys.stderr)
        if group.remedy:
            print(f"  next: {group.remedy}", file=sys.stderr)
        return group.exit_code
    said = mask_text(str(group).strip() or "no further words")
    print(f"gpustackd: something unexpected went wrong: {type(group).__name__}: {said}", file=sys.stderr)
    if not _tracebacks:
        print(f"  next: {_keep(error)}", file=sys.stderr)
    return UNEXPECTED


def _where(error: BaseException) -> str:
    return mask_text("".join(traceback.format_exception(error)))


def _keep(error: BaseException) -> str:
    """Write the details to a file and say where."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="gpustackd-error-", suffix=".txt", delete=False) as file:
            file.write(_where(error))
    except OSError:
        return "run it again with `gpustackd --debug …` for the details"
    return f"the details are in {file.name}; please report them"
