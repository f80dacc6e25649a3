"""Dimensions of public models as the peer reads them out of their configurations."""

from __future__ import annotations

import pytest

from tests.gpustack_reference.cases import known_models
from tests.gpustack_reference.production import models

KNOWN = known_models()


@pytest.mark.parametrize("name", [n for n, entry in KNOWN.items() if entry.get("parsed_by_peer")])
def test_public_models_are_read_as_the_peer_reads_them(name: str) -> None:
    for key, expected in KNOWN[name]["parsed_by_peer"].items():
        assert models.dimension(KNOWN[name]["hf_config"], key) == expected, key
