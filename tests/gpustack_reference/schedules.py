"""Cases of scaling schedules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from tests.gpustack_reference.cases import Case, known, needed, one_of
from tests.gpustack_reference.judgement import Finding
from tests.gpustack_reference.production import schedules

INPUTS = {
    "checks", "rule", "schedule", "on", "submitted_replicas", "now", "timezone", "backend", "models",
}  # fmt: skip
EXPECTED = {
    "replicas", "accepted", "replicas_after_save", "replicas_seen_by_validation", "visited",
    "baseline_replicas", "max_intended_replicas",
}  # fmt: skip
MODEL = {"id", "name", "scaling_schedule", "schedule", "replicas", "roles"}


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    inputs, expect = case["inputs"], case["expect"]
    known(inputs, INPUTS, "inputs")
    known(expect, EXPECTED, "expect")
    if "replicas" in expect:
        yield Finding("replicas", expect["replicas"], [_at(c, n) for n, c in enumerate(inputs["checks"])])
    if "accepted" in expect:
        yield Finding("accepted", expect["accepted"], schedules.accepted(_whole(inputs)))
    if "replicas_after_save" in expect:
        yield from _saved(inputs, expect)
    if "models" in inputs:
        yield from _models(inputs["models"], expect)
    elif {"baseline_replicas", "max_intended_replicas"} & set(expect):
        _, baseline, most = schedules.numbers(_whole(inputs))
        yield from _numbers(expect, baseline, most)


def _whole(inputs: dict[str, Any]) -> Any:
    """The schedule; one that is good but for its rule, where a case gives the rule alone."""
    if "rule" in inputs:
        return {"enabled": True, "baseline_replicas": 0, "rules": [inputs["rule"]]}
    return needed(inputs, "schedule", "inputs")


def _at(check: dict[str, Any], n: int) -> int | None:
    known(check, {"schedule", "now", "timezone"}, f"inputs.checks[{n}]")
    return schedules.replicas_at(check["schedule"], _moment(check["now"]), check.get("timezone", "UTC"))


def _moment(text: str | None) -> datetime:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return datetime(2026, 11, 17, 12, tzinfo=UTC)  # "any time in November"


def _saved(inputs: dict[str, Any], expect: dict[str, Any]) -> Iterator[Finding]:
    """The row is written as it was submitted, then the daemon brings the model to its number."""
    one_of(inputs.get("on", "save"), {"save"}, "inputs.on")
    submitted = inputs.get("submitted_replicas")
    planned = needed(inputs, "schedule", "inputs")
    number = schedules.replicas_at(planned, _moment(inputs.get("now")), inputs.get("timezone", "UTC"))
    if number is None:
        # a pause sets 0 once, by a trigger of the database (tests/integration), else the row's number counts
        number = 0 if (planned or {}).get("enabled") and planned.get("paused") else submitted
    yield Finding("replicas_after_save", expect["replicas_after_save"], number)
    if "replicas_seen_by_validation" in expect:
        yield Finding("replicas_seen_by_validation", expect["replicas_seen_by_validation"], submitted)


def _models(models: list[dict[str, Any]], expect: dict[str, Any]) -> Iterator[Finding]:
    """One look at every model that has a schedule."""
    visited, baselines, most = [], [], []
    for n, model in enumerate(models):
        known(model, MODEL, f"inputs.models[{n}]")
        looked, baseline, peak = schedules.numbers(model.get("scaling_schedule", model.get("schedule")))
        if looked:
            visited.append(model.get("name", model.get("id")))
            baselines.append(baseline)
            most.append(peak)
    if "visited" in expect:
        got = len(visited) if isinstance(expect["visited"], int) else visited
        yield Finding("visited", expect["visited"], got)
    yield from _numbers(expect, baselines, most)


def _numbers(expect: dict[str, Any], baseline: Any, most: Any) -> Iterator[Finding]:
    for name, got in (("baseline_replicas", baseline), ("max_intended_replicas", most)):
        if name in expect:
            one = isinstance(got, list) and len(got) == 1 and not isinstance(expect[name], list)
            yield Finding(name, expect[name], got[0] if one else got)
