"""Every error that gpustackd raises on purpose, with what a person should do next."""

from __future__ import annotations


class GpustackdError(Exception):
    """An error with a message for people: `problem` says what and where, `remedy` what to do."""

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
    """The database cannot be reached or refuses us (exit code 3). `passing`: it says that it is starting, or
    going down for a moment."""

    exit_code = 3
    passing = False


class Contended(GpustackdError):
    """The database made us yield (lock or statement time-out, deadlock): nothing was written; try again."""


class WrongRevision(GpustackdError):
    """The schema is older or newer than this build, or absent (exit code 3)."""

    exit_code = 3


class Refused(GpustackdError):
    """The answer is no: a document, a change or a placement that is not allowed (exit code 1)."""


class BadRow(GpustackdError):
    """One row holds something that cannot be used; only that row suffers.

    `field` names the column (or path in it), so that the message on the row can say where.
    """

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}", remedy)
        self.field = field


class ModelUnreadable(GpustackdError):
    """What a model is made of could not be read. `retryable`: a later try may succeed unchanged
    (hub down, time-out); otherwise only an edit of the model or its files helps."""

    def __init__(self, code: str, problem: str, remedy: str = "", *, retryable: bool = False) -> None:
        super().__init__(problem, remedy)
        self.code = code
        self.retryable = retryable
