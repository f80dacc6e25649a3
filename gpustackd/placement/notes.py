"""Every "Do better" note of the specifications that concerns sizing and placing: what it is here, and where.

A note that mends a crash, a wrong number, a leak or a refusal of what fits is the default (`MEND`). A note
that would only prefer another correct placement is an opt-in setting (`PREFER`, `GPUSTACKD_PREFER_*`).
`LATER` notes belong to parts that are not built yet.
"""

from __future__ import annotations

from gpustackd.placement.note import Kind, Note
from gpustackd.placement.notes_choosing import (
    CHOOSING,
    PREFER_DOMINANT_RESOURCE,
    PREFER_MEAN_OVER_GPUS,
)

PREFER_DRAFT_WEIGHTS = "prefer_draft_weights"
PREFERENCES = (PREFER_MEAN_OVER_GPUS, PREFER_DOMINANT_RESOURCE, PREFER_DRAFT_WEIGHTS)
"""Settings that switch preferences on, as `GPUSTACKD_` names in lower case."""

_M, _P, _L = Kind.MEND, Kind.PREFER, Kind.LATER

NOTES: tuple[Note, ...] = (
    # -- reading and sizing models
    Note(
        "estimate.2.one_format",
        _M,
        "one format, counted once, alike for hubs and paths",
        "sources.weight_files",
    ),
    Note("estimate.2.listing", _M, "listings age, and are pinned to a commit", "sources.library"),
    Note(
        "estimate.2.known_size",
        _M,
        "a downloaded copy's size goes before a hub's and a worker's; doubles that it holds do not count",
        "sources.copies",
    ),
    Note(
        "estimate.2.2.workers",
        _M,
        "silent workers leave it unknown; losers are cancelled",
        "sources.worker_files",
    ),
    Note("estimate.2.3.unknown", _M, "a size that is not known is said, and never 0", "domain.facts"),
    Note(
        "estimate.3.local_adapters", _M, "adapters on paths count whatever the base model", "sources.reader"
    ),
    Note("estimate.4.override", _M, "an override that is no number is told and not used", "estimate.claim"),
    Note(
        "estimate.4.draft",
        _P,
        "the weights of a draft model count",
        f"GPUSTACKD_{PREFER_DRAFT_WEIGHTS.upper()}",
    ),
    Note(
        "estimate.4.sequence", _M, "a booking without room for a longest sequence is told of", "daemon.judge"
    ),
    Note("estimate.5.ratio", _M, "RAM that follows the booking is checked as it is booked", "fit.cards"),
    Note(
        "estimate.6.1.data",
        _M,
        "configurations are data; no code of a repository runs",
        "sources.config_json",
    ),
    Note("estimate.6.3.roots", _L, "model roots that a worker's file API keeps to: the worker's side of it"),
    Note(
        "estimate.7.readings", _M, "vision parts, `dtype`, latent attention are read", "sources.config_json"
    ),
    Note(
        "estimate.9.table", _M, "architectures are a data file; endings tell the rest", "estimate.categories"
    ),
    Note(
        "estimate.11.custom", _M, "engines of a person's own are not held against tables", "estimate.evaluate"
    ),
    Note("estimate.11.1.enough_picked", _M, "fewer picked GPUs than replicas are refused", "fit.engines"),
    # -- selectors: common rules
    Note("selectors.1.effective_backend", _M, "an unset backend means vLLM", "estimate.demand"),
    Note("selectors.2.vram_utilization", _M, "the share of a card is told on every claim", "fit.seat"),
    Note(
        "selectors.3.1.subordinate_ram",
        _M,
        "RAM of subordinates counts; RAM does not depend on GPU type",
        "domain.occupancy",
    ),
    Note("selectors.3.1.key_by_type", _M, "memory is kept per device, not per index", "domain.fleet"),
    Note(
        "selectors.3.2.missing_memory",
        _M,
        "missing memory is unknown: nothing is placed there, nothing crashes",
        "domain.columns",
    ),
    Note(
        "selectors.3.2.unified_any_index",
        _M,
        "unified memory is a pool of the worker, whatever the index",
        "domain.columns",
    ),
    Note(
        "selectors.4.parameters",
        _M,
        "`_` for `-`, last one wins, bad integers reported, --no-x",
        "domain.backend_parameters",
    ),
    Note("selectors.6.type_grouping", _M, "a worker with several GPU types keeps them all", "fit.cards"),
    Note(
        "selectors.7.count", _M, "a choice over several workers has exactly the GPUs asked for", "fit.manual"
    ),
    Note("selectors.7.rate_order", _M, "subordinate GPUs are ordered by what is free", "fit.manual"),
    Note(
        "selectors.7.limit",
        _M,
        "one distributed instance of an engine per worker, main worker included",
        "fit.limit",
    ),
    Note("selectors.7.explain", _M, "an empty result of a selection is explained", "hand_picked"),
    Note("selectors.7.ram", _M, "RAM is checked for hand-picked GPUs", "fit.manual"),
    Note(
        "selectors.7.2.absolute",
        _M,
        "an absolute claim is compared with free memory and rounded up",
        "fit.manual",
    ),
    Note("selectors.7.2.effective", _M, "only GPUs with room count as effective", "fit.manual"),
    # -- vLLM
    Note(
        "selectors.9.1.hf_overrides",
        _M,
        "--hf-overrides names architectures; bad JSON is reported",
        "fit.vllm",
    ),
    Note(
        "selectors.6.1.whole_tower",
        _M,
        "a vision tower that vLLM keeps whole (FR-10: 25 heads) refuses no tensor-parallel size",
        "fit.vllm",
    ),
    Note("selectors.9.1.share_range", _M, "0 < utilization <= 1, numbers only", "fit.vllm"),
    Note("selectors.9.3.at_least_share", _M, ">= the share for several GPUs, as for one", "fit.cards"),
    Note(
        "selectors.9.3.world_size",
        _M,
        "an explicit world size is taken exactly; divisibility concerns tp",
        "fit.one_worker",
    ),
    Note(
        "selectors.9.3.absolute_split",
        _M,
        "an absolute need is split, not everything booked",
        "fit.one_worker",
    ),
    Note(
        "selectors.9.3.distributed_claims",
        _M,
        "an absolute need over workers books its parts, not 0 bytes",
        "over_workers",
    ),
    Note("selectors.9.3.two_workers", _M, "a distributed placement has two workers or more", "over_workers"),
    Note(
        "selectors.9.3.tightest",
        _M,
        "alike workers, fewest first: part of the tie order (design 6)",
        "over_workers",
    ),
    # -- SGLang
    Note("selectors.10.1.bare_flags", _M, "bare switches are recognised", "fit.sglang"),
    Note(
        "selectors.10.2.fraction_range",
        _M,
        "a fraction outside (0, 1) is refused or told, never used",
        "fit.sglang",
    ),
    Note("selectors.10.2.vision_dict", _M, "dimensions of the vision part are read", "fit.sglang"),
    Note(
        "selectors.10.2.per_replica",
        _M,
        "gpus_per_replica without ids has no effect and does not crash",
        "fit.sglang",
    ),
    Note("selectors.10.3.world_size", _M, "several workers have the exact world size", "over_workers"),
    Note(
        "selectors.10.3.full_card",
        _M,
        "a card that is too full takes no part; its group of cards still may",
        "fit.one_worker",
    ),
    Note(
        "selectors.10.3.image_free", _M, "an image model is held against free, not total memory", "fit.cards"
    ),
    Note("selectors.10.3.image_claim", _M, "an image model claims its need per GPU", "fit.one_worker"),
    Note(
        "selectors.10.3.messages",
        _M,
        "largest GPU of the fleet; every failed check leaves a message",
        "shortfall",
    ),
    # -- custom backends
    Note("custom.A.1.cases", _M, "the local KV cache's RAM comes on top", "estimate.demand"),
    Note("custom.A.2.manual_fraction", _M, "the card's fraction holds for hand-picked GPUs too", "fit.rules"),
    Note(
        "custom.A.3.fewest",
        _M,
        "fewest cards that hold the need, each with room for its part",
        "fit.one_worker",
    ),
    Note("custom.A.4.ram", _M, "RAM that is short is said", "shortfall"),
    # -- MindIE
    Note("mindie.2.one_element", _M, "an element may hold a flag and its value", "fit.mindie_flags"),
    Note(
        "mindie.4.latent_attention",
        _M,
        "latent attention keeps lora rank + rope dimensions",
        "estimate.mindie",
    ),
    Note("mindie.4.version", _M, "an unset version is the installed default", "estimate.mindie"),
    Note("mindie.4.unknown_weights", _M, "weights of unknown size are no weights of 0", "estimate.mindie"),
    Note("mindie.4.dtype", _M, "--dtype counts, `dtype` is read", "estimate.mindie"),
    Note("mindie.5.heads", _M, "heads divide by tp, not by the world", "fit.mindie_world"),
    Note("mindie.6.addresses", _M, "addresses are those of the GPUs taken, in their order", "fit.npus"),
    Note("mindie.6.limit", _M, "a worker that holds a distributed instance is named", "npus_lacking"),
    Note("mindie.7.reasons", _M, "RAM or fraction, with numbers, for workers passed over", "npus_lacking"),
    Note("mindie.7.mixed_types", _M, "NPUs only; other cards of the worker change nothing", "fit.npus"),
    Note("mindie.8.effective", _M, "what is booked is shown once; divisibility is said", "npus_lacking"),
    Note("mindie.9.first_prefix", _M, "no more workers than hold the model and divide it", "npus"),
    Note(
        "mindie.9.multiple", _M, "a world no multiple of its part on a worker is refused", "fit.mindie_world"
    ),
    Note("mindie.9.fewest_first", _M, "fewest workers first: part of the tie order (design 6)", "npus"),
    Note("mindie.10.member_cost", _L, "cost of one member, for refusals of groups"),
    # -- pools of cards: slices and whole cards
    Note("vgpu.B.2.cluster", _M, "a pool is looked up in the model's cluster, which must be set", "fit.pool"),
    Note("vgpu.B.3.whole_card", _M, "whole cards need no software slicing, but untouched cards", "pooled"),
    Note("vgpu.B.3.remaining", _M, "what remains of a card must cover the share asked for", "fit.pool"),
    Note("vgpu.B.3.ledger", _M, "the ledger counts, with an inventory or without", "pooled"),
    Note("vgpu.B.3.ram", _M, "RAM is checked on every worker", "pooled"),
    Note("vgpu.B.4.world", _M, "slices over workers: the world size, or a number that divides", "pooled"),
    Note("vgpu.B.4.ram", _M, "every worker books its RAM", "fit.seat"),
    Note("vgpu.B.4.placeholder", _M, "cards are picked and booked, no placeholder stands for them", "pooled"),
    Note(
        "whole.C.message",
        _M,
        "need, cards, size and the tensor-parallel size that would do",
        "pooled_lacking",
    ),
    Note("whole.C.free_cards", _M, "only untouched cards are taken", "pooled"),
    Note("whole.C.full_card", _M, "all of a card is booked, whatever the engine reserves", "pooled"),
    # -- GGUF
    Note(
        "gguf.2.flags", _M, "the last flag counts, as in llama.cpp; auto, all, -1 and -2 are read", "fit.gguf"
    ),
    Note("gguf.3.unknown_claim", _L, "a running instance without a claim occupies what is seen in use"),
    Note(
        "gguf.4.copies",
        _M,
        "selected GPUs restrict the search, never the workers it was given",
        "gguf_picked",
    ),
    Note("gguf.4.one_header", _M, "one header, all sizes in this process", "estimate.gguf"),
    Note("gguf.6.ram", _M, "a worker short of RAM hides no other", "gguf_tiers"),
    Note("gguf.7.fewest", _M, "as few GPUs as hold the layers, no walk over subsets", "fit.gguf_layers"),
    Note(
        "gguf.7.whole_layers",
        _M,
        "whole layers by what cards hold; the split is their number",
        "fit.gguf_plan",
    ),
    Note(
        "gguf.7.given_split",
        _M,
        "given shares lie on GPUs that hold them, by real free memory",
        "fit.gguf_plan",
    ),
    Note(
        "gguf.8.greedy",
        _M,
        "remote GPUs one by one, then without each; a budget that is told",
        "gguf_over_workers",
    ),
    Note("gguf.8.mains", _M, "every worker is tried as the main one", "gguf_over_workers"),
    Note("gguf.8.many", _M, "many eligible GPUs are no reason to give up", "gguf_over_workers"),
    Note("gguf.8.small", _M, "GPUs that hold no layer take no part", "gguf_over_workers"),
    Note("gguf.8.remote_ram", _M, "a process that serves a GPU books RAM", "gguf_over_workers"),
    Note(
        "gguf.8.unified",
        _M,
        "on unified memory RAM and VRAM share one pool, remote or not",
        "gguf_over_workers",
    ),
    Note("gguf.8.full_only", _M, "only all layers are tried where none may stay in RAM", "gguf_over_workers"),
    Note("gguf.9.unified", _M, "figures of unified memory only, and the sum against the pool", "gguf_tiers"),
    Note("gguf.9.output_first", _M, "levels count the output first, as llama.cpp does now", "estimate.gguf"),
    Note("gguf.9.fewest", _M, "of equal levels the one with fewer GPUs", "gguf_tiers"),
    Note("gguf.9.at_least", _M, "a card is filled to the last byte", "gguf_tiers"),
    Note("gguf.9.told", _M, "the level that was within reach, and what was short", "gguf_lacking"),
    Note("gguf.9.experts", _L, "experts of some blocks in RAM as a level of its own"),
    Note(
        "gguf.10.go_on",
        _M,
        "every worker is looked at for its RAM; without GPUs first where equal",
        "gguf_tiers",
    ),
    Note("gguf.11.index_order", _M, "GPUs in the order of their indexes, the split with them", "gguf_tiers"),
    Note("gguf.12.records", _M, "one structured reason for each way, all kept", "gguf_lacking"),
    Note("gguf.12.unsized", _M, "nothing is placed on a claim of zero", "fit.gguf"),
    *CHOOSING,
)
