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
    found = _heart(error)
    if isinstance(found, GpustackdError):
        print(f"gpustackd: {mask_text(found.problem)}", file=sys.stderr)
        if found.remedy:
            print(f"  next: {found.remedy}", file=sys.stderr)
        return found.exit_code
    said = mask_text(str(found).strip() or "no further words")
    print(f"gpustackd: something unexpected went wrong: {type(found).__name__}: {said}", file=sys.stderr)
    if not _tracebacks:
        print(f"  next: {_keep(error)}", file=sys.stderr)
    return UNEXPECTED


def _heart(error: BaseException) -> BaseException:
    """The error that a task group wrapped: one of ours if there is any, else the first."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(GpustackdError)
        error = (ours or error).exceptions[0]
    return error


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
