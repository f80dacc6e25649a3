"""One class of deliberate differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.judgement import Finding

KEEP = object()
"""What `right` gives where a case or a finding is not of the class: the peer's value stands."""


@dataclass(frozen=True)
class Difference:
    """Where production answers otherwise on purpose, and what is right there.

    `right` looks at the data of the case, never at its id, and does not use the product: it is an oracle of
    its own. A finding to which a class gives a value has to have that value, whether the peer's is the same
    or not.
    """

    code: str
    what: str
    """What is otherwise, in one line."""
    reason: str
    """Why."""
    serves: str
    """Whom it serves."""
    findings: tuple[str, ...]
    """Names of findings that it concerns; `*` stands for anything."""
    right: Callable[[Case, Finding], Any]

    def says(self, case: Case, finding: Finding) -> Any:
        """The right value of a finding; KEEP where the class has nothing to say of it."""
        if not any(fnmatchcase(finding.what, name) for name in self.findings):
            return KEEP
        return self.right(case, finding)
