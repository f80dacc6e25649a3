"""SQL files as single statements, since a prepared statement takes only one."""

from __future__ import annotations

from pathlib import Path


def statements(file: Path) -> list[str]:
    """Statements of a file, split at each `;` that ends a line outside a dollar-quoted body. Raises ValueError
    where the file ends within a statement."""
    complete: list[str] = []
    lines: list[str] = []
    quoted = False
    for line in file.read_text("utf-8").splitlines():
        lines.append(line)
        quoted ^= line.count("$$") % 2 == 1
        if not quoted and line.rstrip().endswith(";") and not line.lstrip().startswith("--"):
            complete.append("\n".join(lines).strip())
            lines = []
    rest = "\n".join(lines).strip()
    if rest and not all(x.startswith("--") for x in rest.splitlines()):
        raise ValueError(f"{file.name} ends within a statement")
    return complete
