"""Opt-in preferences between placements that are all correct: settings `GPUSTACKD_PREFER_*`."""

from __future__ import annotations

PREFER_MEAN_OVER_GPUS = "prefer_mean_over_gpus"
"""`binpack` values several GPUs of one worker by their mean, not by the best of them."""
PREFER_DOMINANT_RESOURCE = "prefer_dominant_resource"
"""`binpack` values a GPU by the scarcer of RAM and VRAM, not by a weighted mean of both."""
PREFER_DRAFT_WEIGHTS = "prefer_draft_weights"
"""The claim of a model with a draft model counts the draft's weights."""
