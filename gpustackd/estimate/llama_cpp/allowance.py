"""What a claim adds to the sizes: runtimes, the process, a margin. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.domain.gguf_facts import GgufFacts

MIB = 1024**2
TOKEN = 100
"""RAM for each token of the vocabulary, besides its text."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """`runtime`: a GPU's context and libraries on each device; `process`: the same on the host."""

    runtime: int = 500 * MIB
    unified_runtime: int = 100 * MIB
    """Where devices share the host's memory: command buffers and kernels, no context of their own."""
    process: int = 200 * MIB
    margin: float = 0.02
    """Of the compute buffer."""

    def device(self, compute: int) -> tuple[int, int]:
        """What one device gets on top: with memory of its own, and with the host's."""
        margin = int(self.margin * compute)
        return self.runtime + margin, self.unified_runtime + margin

    def host(self, facts: GgufFacts) -> int:
        """What the process takes besides weights and buffers."""
        return self.process + facts.metadata_bytes + TOKEN * facts.vocabulary
