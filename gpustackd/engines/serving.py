"""Lengths, batch and cache type that an engine serves with: what memory depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

BATCHED_TOKENS = 8192
"""Tokens of one step where no flag says it: vLLM's server on large cards, SGLang's chunk on 80 GB cards."""
SEQUENCES = 256
LONGEST = 2**31


@dataclass(frozen=True, slots=True)
class ServingFlags:
    """Lengths in tokens."""

    max_len: int
    batched_tokens: int = BATCHED_TOKENS
    sequences: int = SEQUENCES
    kv_dtype: str | None = None
    eager: bool = False
    """No CUDA graphs."""


def tokens(raw: str | None) -> int | None:
    """A number of tokens as vLLM reads it (`human_readable_int`): `32768`, `32k` (thousands), `32K` (times
    1024). None where the text is none, or the number not from 1 to `LONGEST`."""
    found = _HUMAN.fullmatch((raw or "").strip())
    if found is None or len(found[1]) > 15:
        return None
    number = int(float(found[1]) * _SCALE[found[2]])
    return number if 0 < number <= LONGEST else None
