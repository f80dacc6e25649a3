"""Notes on filters and scorers, and the preferences among them."""

from __future__ import annotations

from gpustackd.placement.note import Kind, Note

PREFER_MEAN_OVER_GPUS = "prefer_mean_over_gpus"
PREFER_DOMINANT_RESOURCE = "prefer_dominant_resource"

_M, _P, _L = Kind.MEND, Kind.PREFER, Kind.LATER

CHOOSING: tuple[Note, ...] = (
    # -- scorers
    Note("scorers.P1", _M, "mean, not sum, over subordinates", "score.strategy"),
    Note("scorers.P2", _L, "count instances, not cards, per worker"),
    Note(
        "scorers.3.2.undeployed",
        _M,
        "a model that is only planned is held against what is there, as a deployed one is",
        "score.rating",
    ),
    Note(
        "scorers.P3",
        _P,
        "mean over GPUs in place of the best one",
        f"GPUSTACKD_{PREFER_MEAN_OVER_GPUS.upper()}",
    ),
    Note("scorers.P4", _M, "every scorer stays within its maximum", "score.strategy"),
    Note(
        "scorers.P5",
        _P,
        "the scarcer of RAM and VRAM decides",
        f"GPUSTACKD_{PREFER_DOMINANT_RESOURCE.upper()}",
    ),
    Note(
        "scorers.P6",
        _P,
        "capacity is kept usable for the demands to come",
        "placement_strategy: fragmentation, score.fragmentation",
    ),
    Note("scorers.P7", _M, "unknown is 0, one bad row stops nobody", "score.strategy"),
    Note("scorers.P8", _L, "GPU interconnect of several cards"),
    Note(
        "scorers.P9",
        _M,
        "even scores: fewer hosts, less booked, fewer bytes to download, then the name",
        "score.rating",
    ),
    Note(
        "scorers.4.bytes",
        _M,
        "bytes still to download, adapters and files on their way included, decide between even scores",
        "score.locality",
    ),
    Note("scorers.4.shared", _L, "files on a file system that workers share are ready on all of them"),
    Note("scorers.4.scale", _L, "points for files rise with the size of the model"),
    # -- filters
    Note("filters.1.raising", _M, "a filter that fails is left out, told and counted", "placement.faults"),
    Note(
        "filters.2.malformed", _M, "an id that cannot be read stops its own model alone", "domain.model_spec"
    ),
    Note("filters.D1", _M, "every dropped worker is known by filter and code", "filters.chain"),
    Note("filters.D2", _M, "an emptied pool says what else would fail", "filters.chain"),
    Note("filters.D3", _M, "warnings of an over-committing choice stay with the placement", "hand_picked"),
    Note("filters.D4", _M, "no cluster means any cluster", "filters.cluster"),
    Note("filters.D6", _M, "In, NotIn, Exists, DoesNotExist, preferred terms", "filters.labels"),
    Note("filters.D7", _M, "states and names of workers that are not ready", "filters.status"),
    Note(
        "filters.D8",
        _M,
        "a local path is looked for wherever the model may go; known files first, silence is no absence",
        "filters.local_path",
    ),
    Note(
        "filters.W1",
        _M,
        "the image is looked up as the worker does: no image newer than the host's major version",
        "filters.framework_verdict",
    ),
    Note("filters.W2", _M, "the CPU architecture is part of the match", "filters.framework_verdict"),
    Note("filters.W3", _M, "a mixed host offers only the cards that the engine runs on", "filters.framework"),
    Note(
        "filters.W4", _M, "a version for `cpu` admits no card, one for `any` admits all", "filters.framework"
    ),
    Note(
        "filters.W5",
        _M,
        "an Ascend chip with an unknown name is dropped; one that is not reported is taken for the 910b",
        "filters.framework_verdict",
    ),
    Note("filters.W6", _M, "versions are equal as PEP 440 has it; ranges", "filters.versions"),
    Note(
        "filters.W7",
        _M,
        "registered versions are added to the catalogue and never replace it",
        "filters.framework_verdict",
    ),
    Note(
        "filters.W8", _M, "a GGUF file without a backend goes anywhere, as Custom does", "filters.framework"
    ),
    Note("filters.W9", _M, "a router is not held to the engine's images", "filters.framework"),
    Note(
        "filters.W10", _M, "backends are read when they change, answers are kept", "filters.framework_verdict"
    ),
    Note("filters.3.3.blank_pin", _M, "a blank version is told as no version", "domain.model_spec"),
)
