"""What a downloaded copy of a model says about its size, beside what the model's source says.

A copy that is registered as complete is what an engine will load, so its size goes before the word of a hub
or of a worker (estimate spec section 2, "Do better" d). A copy holds everything that its source lists,
though, the same weights in a second format included: a size that the listing explains leaves the weights as
they are.
"""

from __future__ import annotations

from dataclasses import replace

from gpustackd.domain.facts import ModelFacts
from gpustackd.sources.facts_of import digest_of

SLACK = 1.02
"""A copy may hold a little more than its source lists: what the downloader notes down beside the files."""


def settled(facts: ModelFacts, known: int | None) -> ModelFacts:
    """The facts with the size that counts; `known` is what a copy weighs, in bytes, None = there is none.

    Files on this host need no registry, and the estimate of a GGUF model stands on its header.
    """
    own = facts.weight_bytes
    if not known or known <= 0 or known == own or facts.gguf is not None or facts.on_this_host:
        return facts
    if own is None:
        told = f"sized by a downloaded copy: {facts.unknown_because}"
    elif own <= known <= (facts.listed_bytes or 0) * SLACK:
        return facts
    else:
        told = f"sized by a downloaded copy of {known} bytes; its source says {own}"
    found = replace(facts, weight_bytes=known, unknown_because="", warnings=(*facts.warnings, told))
    return replace(found, digest=digest_of(found))
