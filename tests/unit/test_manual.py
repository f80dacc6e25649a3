"""docs/manual.md says what the code says: its generated parts are those that `make docs` would write."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual", ROOT / ".ci" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("section", ["commands", "settings", "tables", "metrics", "events"])
def test_a_generated_section_is_in_step_with_the_code(manual: ModuleType, section: str) -> None:
    text = (ROOT / "docs/manual.md").read_text("utf-8")
    assert set(manual.SECTIONS) == {"commands", "settings", "tables", "metrics", "events"}

    def part(of: str) -> str:
        return of.partition(f"<!-- generated: {section} -->")[2].partition(f"<!-- end: {section} -->")[0]

    assert part(text) == part(manual.render(text)), "bring docs/manual.md up to date with: make docs"


def test_every_setting_and_column_is_explained(manual: ModuleType) -> None:
    assert manual.unexplained((ROOT / "docs/manual.md").read_text("utf-8")) == []


def test_what_was_written_by_hand_outlives_a_new_default(manual: ModuleType) -> None:
    text = (ROOT / "docs/manual.md").read_text("utf-8")
    older = text.replace("| `GPUSTACKD_POOL_SIZE` | `5` |", "| `GPUSTACKD_POOL_SIZE` | `7` |")
    assert older != text
    assert manual.render(older) == text
