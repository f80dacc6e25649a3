"""Finds code that stands twice in gpustackd/: `python -m tests.duplicates [CHECKOUT]` prints the blocks.

A block is six or more lines inside functions that stand elsewhere too, with all names alike, all literals
alike, and without comments, docstrings and blank lines. Declarations are left out, since a list of fields
says something each time: imports, heads of functions, annotated names, attributes that are set to an argument
or a literal, and fields of records (`vram=claim.vram` or `"ram": row["ram"]` on a line of its own). Each
further place counts once, however long the block there is.
"""

from __future__ import annotations

import ast
import io
import keyword
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LINES = 6


class Line(NamedTuple):
    """One line of code: its number, its tokens with names and literals alike, and its tokens as they are."""

    number: int
    shape: str
    text: str


@dataclass
class Block:
    """Lines of a file that stand elsewhere too: `first` is the number of the first of them there."""

    path: Path
    line: int
    first_path: Path
    first: int
    length: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.length} lines) as {self.first_path}:{self.first}"


def blocks(root: Path, *, letter_by_letter: bool = False) -> list[Block]:
    """All blocks below `root/gpustackd` in the order of paths; with `letter_by_letter` names and literals
    have to be equal too."""
    first: dict[tuple[str, ...], tuple[Path, int, int]] = {}
    found: list[Block] = []
    for path in sorted((root / "gpustackd").rglob("*.py")):
        lines = code_lines(path)
        end = -1
        for i in range(len(lines) - LINES + 1):
            window = lines[i : i + LINES]
            key = tuple(line.text if letter_by_letter else line.shape for line in window)
            other, at, number = first.setdefault(key, (path, i, lines[i].number))
            if other == path and i - at < LINES:
                continue  # itself, or a run of lines of one shape
            if i > end:
                found.append(Block(path, lines[i].number, other, number, LINES))
            else:
                found[-1].length += i + LINES - 1 - end
            end = i + LINES - 1
    return found


def code_lines(path: Path) -> list[Line]:
    """The lines of a file that are looked at."""
    text = path.read_text("utf-8")
    wanted = _statements(ast.parse(text))
    tokens: dict[int, list[tuple[str, str]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] in wanted and token.string.strip() and token.type != tokenize.COMMENT:
            shape = token.string
            if token.type == tokenize.NAME and not keyword.iskeyword(shape):
                shape = "name"
            elif token.type in (tokenize.NUMBER, tokenize.STRING):
                shape = "literal"
            tokens.setdefault(token.start[0], []).append((shape, token.string))
    return [
        Line(number, " ".join(shape for shape, _ in line), " ".join(text for _, text in line))
        for number, line in sorted(tokens.items())
    ]


def _statements(tree: ast.Module) -> set[int]:
    """Numbers of the lines inside functions, without declarations."""
    inside: set[int] = set()
    declared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside.update(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
            declared.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.stmt) and _declares(node):
            declared.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Call):
            declared.update(
                k.value.lineno for k in node.keywords if _plain(k.value) and k.lineno > node.lineno
            )
        elif isinstance(node, ast.Dict):
            declared.update(v.lineno for v in node.values if _plain(v) and v.lineno > node.lineno)
    return inside - declared


def _declares(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.AnnAssign() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Attribute()], value=ast.Name() | ast.Constant()):
            return True
    return False


def _plain(value: ast.expr) -> bool:
    """A name, an attribute or a column of one, or a literal: nothing is computed."""
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return isinstance(value, (ast.Name, ast.Constant))


if __name__ == "__main__":
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for block in blocks(checkout):
        print(block)
    alike, equal = len(blocks(checkout)), len(blocks(checkout, letter_by_letter=True))
    print(f"{alike} blocks stand twice, {equal} of them letter by letter")
