"""How an error is shown: one sentence, what to do next, and an exit code."""

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
    """Whether `report` shows the traceback (`--debug`, or log level debug)."""
    global _tracebacks  # noqa: PLW0603 - an option of the process
    _tracebacks = wanted or os.environ.get("GPUSTACKD_LOG_LEVEL", "").strip().lower() == "debug"


def report(error: BaseException) -> int:
    """Print an error on stderr and return the exit code that stands for it."""
    if _tracebacks:
        print(_traceback(error), file=sys.stderr, end="")
    cause = _cause(error)
    if isinstance(cause, GpustackdError):
        print(f"gpustackd: {mask_text(cause.problem)}", file=sys.stderr)
        if cause.remedy:
            print(f"  next: {cause.remedy}", file=sys.stderr)
        return cause.exit_code
    text = mask_text(str(cause).strip() or "no message")
    print(f"gpustackd: unexpected error: {type(cause).__name__}: {text}", file=sys.stderr)
    if not _tracebacks:
        print(f"  next: {_save(error)}", file=sys.stderr)
    return UNEXPECTED


def _cause(error: BaseException) -> BaseException:
    """The error that a task group wrapped: one of ours if there is any, else the first."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(GpustackdError)
        error = (ours or error).exceptions[0]
    return error


def _traceback(error: BaseException) -> str:
    return mask_text("".join(traceback.format_exception(error)))


def _save(error: BaseException) -> str:
    """Write the traceback to a file; what to do with it."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="gpustackd-error-", suffix=".txt", delete=False) as file:
            file.write(_traceback(error))
    except OSError:
        return "run it again with `gpustackd --debug` for the details"
    return f"please report it with the details in {file.name}"
