"""Where llama.cpp refuses to start, in its own words: from its source
(https://github.com/ggml-org/llama.cpp, src/llama-context.cpp) and measured runs."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.engines.flags import COLUMN
from gpustackd.engines.llama_cpp.flags import LlamaServing
from gpustackd.errors import BadRow
from gpustackd.estimate.llama_cpp.architecture import Dimensions


class LlamaRefusal(BadRow):
    """llama.cpp would not start with these flags; `why` in its words."""

    def __init__(self, why: str) -> None:
        super().__init__(COLUMN, f"llama.cpp refuses to start: {why}")
        self.why = why


def refusal(facts: GgufFacts, dims: Dimensions, serving: LlamaServing) -> str | None:
    """Why llama.cpp does not start with these flags; None where it does."""
    k, v = serving.cache_k, serving.cache_v
    if dims.keys_alone and k is not v:
        return (
            f"model does not support different K ({k.name.lower()}) and V ({v.name.lower()}) cache types:"
            " set --cache-type-k and --cache-type-v alike"
        )
    if v.quantised and serving.flash_attention == "off":
        return "quantized V cache requires flash_attn to be enabled"
    if facts.architecture == "grok" and v.quantised:
        return "flash_attn is not compatible with Grok, and a quantized V cache requires it"
    if serving.flash_attention != "off":
        for which, elem, sizes in (
            ("K", k, [dims.key_of(i) for i in range(dims.layers)]),
            ("V", v, [dims.value_of(i) for i in range(dims.layers)]),
        ):
            uneven = next((s for s in sizes if s % elem.elements), None)
            if elem.quantised and uneven is not None:
                return (
                    f"{which} cache type {elem.name.lower()} with block size {elem.elements} does not divide"
                    f" n_embd_head_{which.lower()}={uneven}"
                )
    return None
