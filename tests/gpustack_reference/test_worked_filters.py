"""What was executed on the peer with eight workers and its packaged images, as cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.verdict import verdict

CARDS = {
    "cpu": None,
    "cuda11": ("cuda", "11.8", None),
    "cuda12": ("cuda", "12.9", None),
    "910b3": ("cann", "8.2", "Ascend910B3"),
    "910a": ("cann", "8.2", "Ascend910A"),
    "ascend": ("cann", "8.2", None),
    "rocm": ("rocm", "6.4", None),
    "cambricon": ("neuware", "1.0", None),
}
FIVE = "cuda11 cuda12 910b3 ascend rocm"
ALL = " ".join(CARDS)


def worker(n: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"id": n, "name": name, "state": "ready", "ram_total": 2**36, "gpus": []}
    if (card := CARDS[name]) is not None:
        kind, level, chip = card
        found["gpus"] = [
            {"index": 0, "type": kind, "runtime_version": level, "arch_family": chip, "vram_total": 2**36}
        ]
    return {"inline": found}


def own(name: str, owner: int | None = None, **frameworks: str | None) -> dict[str, Any]:
    versions = {v.removeprefix("v").replace("_", "."): {"custom_framework": f} if f else {}
                for v, f in frameworks.items()}  # fmt: skip
    return {"name": name, "owner": owner, "versions": versions}


TWO = own("mine", v1_0="cuda", v2_0="rocm")
OLD = "image_that_starts"
MATRIX: list[tuple[dict[str, Any], list[Any], str, str]] = [
    ({"backend": "vLLM"}, [], FIVE, OLD),
    ({"backend": "vLLM", "backend_version": "0.11.0"}, [], FIVE, OLD),
    ({"backend": "vLLM", "backend_version": "0.10.0"}, [], FIVE, OLD),
    ({"backend": "vLLM", "backend_version": "v0.11.0"}, [], "", "same_version"),
    ({"backend": "MindIE"}, [], "910b3 ascend", "equal"),
    ({"backend": "SGLang"}, [], FIVE, OLD),
    ({"backend": "VoxBox"}, [], "cuda11 cuda12", OLD),
    ({"backend": "Custom"}, [], ALL, "equal"),
    ({"backend": "vLLM", "image_name": "mine:1"}, [], ALL, "equal"),
    ({"backend": "vLLM", "cpu_offloading": True}, [], FIVE, OLD),
    ({"backend": "mine"}, [own("mine", v1="cpu")], ALL, "cpu_is_no_accelerator"),
    ({"backend": "mine"}, [TWO], "cuda11 cuda12 rocm", "equal"),
    ({"backend": "mine", "backend_version": "2.0"}, [TWO], "rocm", "equal"),
    ({"backend": "mine", "backend_version": "3.0"}, [TWO], "", "equal"),
    ({"backend": "mine"}, [own("mine", v1=None)], "", "equal"),
    ({"backend": "mine", "backend_version": "1", "owner_principal_id": 2}, [own("mine", 1, v1="cuda")], "",
     "equal"),
    ({"backend": "mine", "backend_version": "1", "owner_principal_id": 1}, [own("mine", 1, v1="cuda")],
     "cuda11 cuda12", "equal"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "backends", "kept", "word"), MATRIX)
def test_the_outcome_matrix(model: dict[str, Any], backends: list[Any], kept: str, word: str) -> None:
    names = kept.split()
    case: Case = {
        "id": "matrix", "area": "filter.backend_framework", "model": {"source": "huggingface", **model},
        "inputs": {"backends": backends}, "workers": [worker(n, w) for n, w in enumerate(CARDS, 1)],
        "expect": {"kept": names, "dropped": [w for w in CARDS if w not in names]},
    }  # fmt: skip
    found = verdict(case)
    assert not found.wrong, found.wrong
    assert (found.classes or ["equal"]) == [word]


def test_the_order_of_rows_of_owners_changes_nothing() -> None:
    rows = [own("mine", v1="cuda"), own("mine", 7, v1="rocm")]
    for backends in (rows, rows[::-1]):
        for owner, kept in ((7, ["rocm"]), (None, ["cuda11", "cuda12"])):
            case: Case = {
                "id": "owners", "area": "filter.backend_framework",
                "model": {"backend": "mine", "owner_principal_id": owner}, "inputs": {"backends": backends},
                "workers": [worker(n, w) for n, w in enumerate(CARDS, 1)], "expect": {"kept": kept},
            }  # fmt: skip
            assert verdict(case).words == "equal"
