"""The verdict on a case: equal, different by a class of the table, or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.gpustack_reference.areas import judge
from tests.gpustack_reference.cases import Case, Unreadable
from tests.gpustack_reference.differences import TABLE
from tests.gpustack_reference.differences.difference import KEEP
from tests.gpustack_reference.judgement import Finding, agree, why_not


@dataclass
class Verdict:
    """How one case came out."""

    case: Case
    findings: int = 0
    classes: list[str] = field(default_factory=list)
    """Codes of the classes that explain what is not as the peer has it."""
    wrong: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """`equal`, `wrong`, or `differs` and the codes of its classes."""
        if self.wrong:
            return "wrong"
        return " ".join(["differs", *self.classes]) if self.classes else "equal"


def verdict(case: Case) -> Verdict:
    """Judge one case."""
    made = Verdict(case)
    try:
        for finding in judge(case):
            made.findings += 1
            _weigh(made, finding)
    except Unreadable as problem:
        made.wrong.append(f"the runner cannot read {problem}")
    if not made.findings and not made.wrong:
        made.wrong.append("the case expects nothing that the runner judges")
    return made


def _weigh(made: Verdict, finding: Finding) -> None:
    for difference in TABLE:
        right = difference.says(made.case, finding)
        if right is KEEP:
            continue
        if not agree(finding.got, right, finding.tolerance):
            made.wrong.append(f"{finding.what} ({difference.code}): {why_not(finding.got, right)}")
        elif not finding.equal and difference.code not in made.classes:
            made.classes.append(difference.code)
        return
    if not finding.equal:
        made.wrong.append(f"{finding.what}: {why_not(finding.got, finding.expected)}")


def told(words: Iterable[str]) -> list[str]:
    """Counts for people, of the words of all verdicts: equal, different by which class, wrong."""
    every = list(words)
    counts, held = Counter(w.split()[0] for w in every), Counter(c for w in every for c in w.split()[1:])
    sums = f"{counts['equal']} equal, {counts['differs']} differ on purpose, {counts['wrong']} wrong"
    lines = [f"{len(every)} cases of GPUStack: {sums}"]
    by_code = {d.code: d for d in TABLE}
    return lines + [f"{n:5} {code}: {by_code[code].what}" for code, n in held.most_common()]


def too_wide(verdicts: Sequence[Verdict]) -> list[str]:
    """Codes of classes that hold more than a tenth of the cases without saying whom they serve."""
    held = Counter(code for v in verdicts for code in v.classes)
    return [d.code for d in TABLE if held[d.code] > len(verdicts) / 10 and not d.serves.strip()]
