"""Weights on one GPU."""

from __future__ import annotations


def weights_per_gpu(weights: int, tp: int = 1, pp: int = 1) -> int:
    """Bytes on each of `tp * pp` GPUs: engines split every large matrix evenly, embeddings by vocabulary;
    what they repeat (norms, biases) is far below a thousandth."""
    return -(-weights // (tp * pp))
