"""Code stands once: blocks that stand twice are counted, and their number only falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.duplicates import LINES, blocks
from tests.package import ROOT

TWICE = 2
"""At 456184a it was 11, one of them letter by letter. What is left are calls and cases of one form."""


def test_few_blocks_stand_twice_and_none_letter_by_letter() -> None:
    alike, equal = blocks(ROOT), blocks(ROOT, letter_by_letter=True)
    assert len(alike) <= TWICE, "\n".join(map(str, alike))
    assert equal == []


@pytest.mark.parametrize(("lines", "found"), [(LINES, 1), (LINES - 1, 0)])
def test_a_block_is_found_whatever_its_names(tmp_path: Path, lines: int, found: int) -> None:
    (tmp_path / "gpustackd").mkdir()
    calls = [f"    call_{n}({', '.join('x' * n)})" for n in range(lines)]
    text = "def first():\n" + "\n".join(calls) + "\n\n\ndef second():\n" + "\n".join(calls) + "\n"
    (tmp_path / "gpustackd" / "one.py").write_text(text)
    assert [b.length for b in blocks(tmp_path)] == [LINES] * found
    assert len(blocks(tmp_path, letter_by_letter=True)) == found
    (tmp_path / "gpustackd" / "one.py").write_text(text.replace("call_", "other_", 1))
    assert len(blocks(tmp_path)) == found
    assert blocks(tmp_path, letter_by_letter=True) == []


def test_declarations_are_no_blocks(tmp_path: Path) -> None:
    (tmp_path / "gpustackd").mkdir()
    fields = "\n".join(f"        self.{n} = {n}" for n in "abcdefgh")
    text = "".join(f"class {n}:\n    def __init__(self, a):\n{fields}\n\n\n" for n in "XY")
    (tmp_path / "gpustackd" / "one.py").write_text(text)
    assert blocks(tmp_path) == []
