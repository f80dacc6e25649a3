"""Every error that gpustackd raises on purpose, with what to do about it."""

from __future__ import annotations


class GpustackdError(Exception):
    """An error with a message for people: `problem` says what is wrong and where, `remedy` what to do."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem} ({self.remedy})" if self.remedy else self.problem


class UsageError(GpustackdError):
    """Wrong command line or settings (exit code 2)."""

    exit_code = 2


class DatabaseUnavailable(GpustackdError):
    """The database cannot be reached or used (exit code 3). `passing`: it is starting or stopping."""

    exit_code = 3
    passing = False


class Contended(GpustackdError):
    """Another transaction was in the way (timeout or deadlock). Nothing was written: retry."""


class WrongRevision(GpustackdError):
    """The schema is older or newer than this build, or absent (exit code 3)."""

    exit_code = 3


class Refused(GpustackdError):
    """A document, a change or a placement that is not allowed (exit code 1)."""


class BadRow(GpustackdError):
    """One row holds something that cannot be used. Only that row is affected.

    `field` names the column, or a path in it.
    """

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}", remedy)
        self.field = field


class ModelUnreadable(GpustackdError):
    """The files of a model could not be read. `retryable`: a later attempt may succeed (hub down, timeout);
    otherwise only an edit of the model or its files helps."""

    def __init__(self, code: str, problem: str, remedy: str = "", *, retryable: bool = False) -> None:
        super().__init__(problem, remedy)
        self.code = code
        self.retryable = retryable
