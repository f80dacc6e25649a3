"""The table of differences: complete, documented, by data alone; and a wrong answer is found out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.gpustack_reference.cases import Case, parts, read_cases
from tests.gpustack_reference.differences import TABLE
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Between, Finding, Holds, OneOf, Tells, agree
from tests.gpustack_reference.verdict import Verdict, told, too_wide, verdict

HERE = Path(__file__).parent


@pytest.mark.parametrize("difference", TABLE, ids=lambda d: d.code)
def test_each_class_says_what_why_and_whom_it_serves(difference: Difference) -> None:
    assert len(difference.what) > 20
    assert len(difference.reason) > 10
    assert len(difference.serves) > 10
    assert difference.findings


def test_codes_are_unique_and_listed_in_the_readme() -> None:
    codes = [d.code for d in TABLE]
    assert not [c for c, n in Counter(codes).items() if n > 1]
    text = (HERE / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == codes


def test_no_class_looks_at_ids_of_cases() -> None:
    for path in (HERE / "differences").glob("*.py"):
        assert not re.search(r"""case(\[|\.get\()["']id["']|["']source["']""", path.read_text()), path


def test_reference_words_stand_here_alone() -> None:
    for path in [*HERE.parent.rglob("*.py"), *HERE.parent.rglob("*.md")]:
        words = r"\b(the|a) peer\b|\bpeer's\b|\bpeers'"
        if HERE not in path.parents and path.name != "test_promises.py":
            assert not re.search(words, path.read_text(), re.IGNORECASE), path


def test_only_the_adapter_imports_the_product() -> None:
    for path in HERE.rglob("*.py"):
        if "production" not in path.parts:
            assert not re.search(r"^\s*(from|import) gpustackd", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("case", read_cases(own=True)[::7], ids=lambda c: str(c["id"]))
def test_the_id_changes_nothing(case: Case) -> None:
    assert verdict(case | {"id": "another"}).words == verdict(case).words


def first(area: str) -> Case:
    return read_cases(area, own=True)[0]


def test_a_wrong_expectation_is_found_out() -> None:
    case = first("vgpu_quantity")
    case["expect"]["mib"][0] += 1
    found = verdict(case)
    assert found.words == "wrong"
    assert "mib" in found.wrong[0]


def test_another_place_than_those_of_the_list_is_found_out() -> None:
    for case in read_cases("selector.vllm", own=True):
        if len(case["expect"]["candidates"]) == 1 and not case["model"].get("gpu_selector"):
            for part in parts(case["expect"]["candidates"][0]):
                part["claim"]["vram"].update({i: v + 1 for i, v in part["claim"]["vram"].items()})
            case["expect"].pop("final", None)
            assert verdict(case).words == "wrong", case["id"]


def test_a_class_holds_production_to_its_value_though_the_peer_has_production_s() -> None:
    """A case of the class whose peer answers as production does is wrong where the oracle says otherwise."""
    mean = next(d for d in TABLE if d.code == "mean_over_workers")
    case = next(c for c in read_cases("selector.vllm", own=True)
                if any(len(x.get("subordinates") or ()) > 1 for x in c["expect"]["candidates"]))  # fmt: skip
    right = mean.says(case, Finding("score", 0.0, 0.0))
    assert right is not KEEP
    assert right == pytest.approx(verdict_score(case))
    assert mean.says(case, Finding("place", None, None)) is KEEP


def verdict_score(case: Case) -> float:
    from tests.gpustack_reference.production.decisions import answer, ready

    return answer(ready(case)).parts["placement"]


def test_what_agrees() -> None:
    assert agree(1.0, 1)
    assert not agree(True, 1)
    assert agree({"a": [1, 2]}, {"a": (1, 2)})
    assert not agree({"a": 1, "b": 2}, {"a": 1})
    assert agree(3, OneOf((2, 3)))
    assert not agree(None, OneOf((2, 3)))
    assert agree(2, Between(1, 3))
    assert not agree(None, Between(1, 3))
    assert agree("1.00 GiB of 2.00", Tells(("1.00", "2.00")))
    assert not agree(None, Tells(("1",)))
    assert not agree(4, Holds("even", lambda v: None if v % 2 else "odd"))


def test_counts_and_classes_that_are_too_wide() -> None:
    assert told(["equal", "differs ties_by_name", "wrong"])[0] == (
        "3 cases of GPUStack: 1 equal, 1 differ on purpose, 1 wrong"
    )
    assert told(["differs ties_by_name"])[1].strip().startswith("1 ties_by_name: of places")
    assert too_wide([Verdict({}, classes=["ties_by_name"])]) == []
