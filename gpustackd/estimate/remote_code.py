"""Whether an engine can only load a model with code of its repository. The code itself is never run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.estimate.categories import tables


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether the repository brings its own configuration class (`auto_map.AutoConfig`) for a model type that
    the common library does not configure by itself."""
    own = config.get("auto_map")
    if not isinstance(own, Mapping) or "AutoConfig" not in own:
        return False
    return config.get("model_type") not in tables().library_types
