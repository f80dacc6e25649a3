"""Example fleet and models, and the writer of model directories that need no disk."""

from __future__ import annotations

from pathlib import Path

from gpustackd.errors import Refused

_PACKAGE = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """Where `fleet.yaml` and `models.yaml` lie: in the checkout, or inside an installed package.

    Raise Refused where neither is there.
    """
    for place in (_PACKAGE.parent / "deploy" / "examples", _PACKAGE / "_examples"):
        if (place / "fleet.yaml").is_file() and (place / "models.yaml").is_file():
            return place
    raise Refused(
        "the example fleet and models are not part of this installation", "run `make demo` in a checkout"
    )
