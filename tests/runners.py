"""The packaged catalogue of engine images as a list, to count its rows and to make others of it."""

from __future__ import annotations

import json
from importlib.resources import files

from gpustackd.engines.images import Runner, runners_of


def packaged_runners() -> list[Runner]:
    """Every image that comes with the package."""
    raw = json.loads((files("gpustackd.engines") / "images.json").read_text("utf-8"))
    return runners_of(raw["columns"], raw["rows"])
