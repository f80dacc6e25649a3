"""How an engine is told to serve: lengths, batch, cache type, as far as memory depends on them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.flags import BackendParameters

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


def serving_flags(backend: str, flags: BackendParameters, hyper: HyperParameters) -> ServingFlags:
    """Read the flags of vLLM, SGLang or MindIE; what is unreadable counts as absent (the search judges)."""
    longest = min(hyper.max_sequence_length, LONGEST)
    if backend == "SGLang":
        chunk = _tokens(flags.text("chunked-prefill-size"))
        return ServingFlags(
            _tokens(flags.text("context-length")) or longest,
            chunk or BATCHED_TOKENS,
            _tokens(flags.text("cuda-graph-max-bs", "max-running-requests")) or SEQUENCES,
            flags.text("kv-cache-dtype"),
            flags.flag("disable-cuda-graph"),
        )
    if backend == "MindIE":
        asked = _tokens(flags.text("max-seq-len")) or min(longest, BATCHED_TOKENS)
        return ServingFlags(asked, _tokens(flags.text("max-prefill-tokens")) or asked, eager=True)
    asked = _tokens(flags.text("max-model-len")) or longest
    batched = _tokens(flags.text("max-num-batched-tokens")) or BATCHED_TOKENS
    return ServingFlags(
        asked,
        batched,
        _tokens(flags.text("max-num-seqs")) or SEQUENCES,
        flags.text("kv-cache-dtype"),
        flags.flag("enforce-eager"),
    )


def _tokens(raw: str | None) -> int | None:
    """A number of tokens as vLLM writes it: `32768`, `32k` (thousands), `32K` (times 1024)."""
    found = _HUMAN.fullmatch((raw or "").strip())
    if found is None or len(found[1]) > 15:
        return None
    number = int(float(found[1]) * _SCALE[found[2]])
    return number if 0 < number <= LONGEST else None
