"""Documents lead somewhere: their links, and the paths of modules that they name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpustackd"
CODE = [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md", *sorted(PACKAGE.rglob("README.md"))]
"""Documents that name modules."""
TESTS = ROOT / "tests/README.md"
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/*.md"), TESTS, *CODE})

LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:[a-z_0-9.*]+/)+(?:[A-Za-z_0-9*.-]+)?|[a-z_0-9]+\.py)`")
"""`package/module`, `package/module.py`, `package/` or `module.py` in running text."""


def prose(document: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> Iterator[str]:
    """What a heading is linked by: lower case, punctuation dropped, blanks as dashes."""
    for heading in re.findall(r"^#+ (.+)$", prose(document), flags=re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in LINK.findall(prose(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("document", CODE, ids=name)
def test_paths_of_modules_exist(document: Path) -> None:
    places = {document.parent, PACKAGE, ROOT}
    for path in PATH.findall(prose(document)):
        found = any(list(place.glob(path.rstrip("/") + end)) for place in places for end in ("", ".py"))
        assert found, f"{path}: there is no such module or folder"
