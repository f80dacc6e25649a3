"""Serving parameters of MindIE, and the limits that its server sets.

A parameter out of its limits keeps the server from starting, so it keeps the model from being placed; the
refusal names flag and value. Public source: the parameters of `config.json` in the MindIE service guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.engines.serving import ServingFlags
from gpustackd.errors import BadRow

FRACTION = "npu-memory-fraction"
FRACTION_ENV = "NPU_MEMORY_FRACTION"
DEFAULT_FRACTION = 0.8
DEFAULT_LENGTH = 8192
"""Tokens of a sequence at most, where no flag says how many."""

_WHOLE: Mapping[str, tuple[int, int, int]] = {
    # default, least, most; what depends on other parameters is checked in `_lengths`
    "max-seq-len": (0, -(2**40), 2**40), "max-input-token-len": (-1, -(2**40), 2**40),
    "max-prefill-tokens": (-1, -(2**40), 2**40), "max-iter-times": (-1, -(2**40), 2**40),
    "max-batch-size": (200, 1, 5000), "max-prefill-batch-size": (50, 1, 2**40),
    "cache-block-size": (128, 1, 2**40), "cpu-mem-size": (0, 0, 2**30), "max-preempt-count": (0, 0, 2**40),
    "max-link-num": (1000, 1, 1000), "token-timeout": (600, 1, 3600), "e2e-timeout": (600, 1, 3600),
    "async-scheduler-wait-time": (120, 1, 3600), "prefill-time-ms-per-req": (150, 0, 1000),
    "decode-time-ms-per-req": (50, 0, 1000), "prefill-policy-type": (0, 0, 3),
    "decode-policy-type": (0, 0, 3),
    "max-queue-delay-microseconds": (5000, 500, 1_000_000), "max-first-token-wait-time": (2500, 0, 3_600_000),
    "max-loras": (0, -(2**40), 2**40), "max-lora-rank": (64, -(2**40), 2**40),
}  # fmt: skip
_WHEN_ON: Mapping[str, tuple[str, int, int, int]] = {
    # switch, default, least, most while the switch is on
    "split-chunk-tokens": ("enable-split", 512, 1, 8192),
    "split-start-batch-size": ("enable-split", 16, 0, 2**40),
    "memory-decoding-length": ("enable-memory-decoding", 16, 1, 16),
    "lookahead-level": ("enable-lookahead", 4, 3, 16), "lookahead-window": ("enable-lookahead", 5, 1, 16),
    "lookahead-guess-set-size": ("enable-lookahead", 5, 1, 16),
    "multi-token-prediction-tokens": ("enable-multi-token-prediction", 1, 1, 2**40),
    "prefill-expected-time-ms": ("enable-buffer-response", 0, 1, 2**40),
    "decode-expected-time-ms": ("enable-buffer-response", 0, 1, 2**40),
}  # fmt: skip
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "log-level": ("Verbose", "Info", "Warning", "Warn", "Error", "Debug"),
    "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
}
_SPLIT_POLICIES = (0, 4, 5, 6, 7)
_JSON = ("kv-pool-config", "models", "override-generation-config", "rope-scaling")
_TEXT = ("openai-support", *_JSON, *_CHOICES)
_NUMBER = ("rope-theta", FRACTION)

PARALLEL: Mapping[str, tuple[str, ...]] = {
    "pp": ("pipeline-parallel-size", "pp"), "tp": ("tensor-parallel-size", "tp"),
    "dp": ("data-parallel-size", "dp"), "cp": ("context-parallel-size", "cp"),
    "sp": ("sequence-parallel-size", "sp"), "moe_tp": ("moe-tensor-parallel-size", "moe-tp"),
    "moe_ep": ("moe-expert-parallel-size", "moe-ep"),
}  # fmt: skip
"""Parallel sizes with all names of their flags, in the order in which answers list them."""

_EXCLUSIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("split", ("memory decoding", "lookahead", "rope scaling")),
    ("memory decoding", ("lookahead", "rope scaling")),
    ("lookahead", ("rope scaling",)),
    ("multi-token prediction", ("memory decoding", "lookahead", "split", "rope scaling")),
    ("prefix caching", ("rope scaling",)),
    ("data parallelism", ("memory decoding", "lookahead", "split", "prefix caching")),
)


@dataclass(frozen=True, slots=True)
class MindieServing:
    """What placement needs of the parameters. Sizes that were not given, or are no sizes, are -1."""

    fraction: float
    """Share of every NPU that the server takes."""
    sizes: Mapping[str, int]
    """By the keys of `PARALLEL`; pp is 1 where it was not given."""


@dataclass(frozen=True, slots=True)
class MindieMemory:
    """Parameters that memory depends on. Lengths in tokens; 0 = the model states none."""

    max_seq_len: int
    max_prefill_tokens: int
    max_iter_times: int
    max_batch_size: int
    cache_block_size: int
    swap_gib: int
    """GiB of RAM for preempted sequences (`--cpu-mem-size`); 0 while nothing is preempted."""
    dtype: str | None


def default_length(hyper: HyperParameters | None) -> int:
    """Tokens of a sequence where no `--max-seq-len` is given; 0 where the model states none."""
    return min(hyper.max_sequence_length, DEFAULT_LENGTH) if hyper else 0


def memory_flags(flags: BackendParameters, length: int) -> MindieMemory:
    """Read what memory depends on; `length` in tokens is used where no `--max-seq-len` is given.

    Raises BadRow for a value out of its own limits. Whether values go together, `serving` checks.
    """
    asked = _limited(flags, "max-seq-len")
    if _given(flags, "max-seq-len"):
        length = _positive_length(asked)

    def or_length(name: str) -> int:
        value = _limited(flags, name)
        return value if value > 0 else length

    swap, preempted = _limited(flags, "cpu-mem-size"), _limited(flags, "max-preempt-count")
    return MindieMemory(
        max_seq_len=length,
        max_prefill_tokens=or_length("max-prefill-tokens"),
        max_iter_times=or_length("max-iter-times"),
        max_batch_size=_limited(flags, "max-batch-size"),
        cache_block_size=_limited(flags, "cache-block-size"),
        swap_gib=swap if preempted else 0,
        dtype=flags.text("dtype"),
    )


def serving_flags(flags: BackendParameters, hyper: HyperParameters) -> ServingFlags:
    """Lengths as the breakdown of an estimate uses them; MindIE captures no graphs. Raises BadRow."""
    read = memory_flags(flags, default_length(hyper))
    return ServingFlags(read.max_seq_len, read.max_prefill_tokens, eager=True)


def serving(flags: BackendParameters, env: Mapping[str, str], length: int) -> MindieServing:
    """Read and check all of them; `length` in tokens is used where no `--max-seq-len` is given.

    Raises BadRow naming the flag (or variable) and its value.
    """
    _need_values(flags)
    whole = {name: _limited(flags, name) for name in _WHOLE}
    if not _given(flags, "max-seq-len"):
        whole["max-seq-len"] = length
    _lengths(whole, _given(flags, "max-seq-len"))
    _batches(whole)
    _check_texts(flags)
    _switches(flags, whole["max-batch-size"])
    sizes = parallel_sizes(flags)
    _powers_of_two(sizes)
    _exclusive(flags, sizes["dp"])
    flags.number("rope-theta")
    return MindieServing(_fraction(flags, env), sizes)


def parallel_sizes(flags: BackendParameters) -> Mapping[str, int]:
    """Parallel sizes by the keys of `PARALLEL`; not given = -1, pp 1.

    Raises BadRow for what is no size; that all but pp are powers of two, `serving` checks.
    """
    sizes = {key: _size(flags, names) for key, names in PARALLEL.items()}
    if not _given(flags, *PARALLEL["pp"]):
        sizes["pp"] = 1
    if sizes["pp"] <= 0:
        raise BadRow(COLUMN, f"--{PARALLEL['pp'][0]} is {sizes['pp']}, it must be positive")
    return sizes


# -- single values -------------------------------------------------------------------------------------


def _given(flags: BackendParameters, *names: str) -> bool:
    return flags.text(*names) is not None


def _need_values(flags: BackendParameters) -> None:
    valued = {
        *_WHOLE,
        *_WHEN_ON,
        *_TEXT,
        *_NUMBER,
        "policy-type",
        *(n for ns in PARALLEL.values() for n in ns),
    }
    for flag in flags.flags:
        if flag.value is None and flag.name in valued:
            raise BadRow(COLUMN, f"--{flag.name} is given without a value")


def _limited(flags: BackendParameters, name: str) -> int:
    default, least, most = _WHOLE[name]
    value = flags.integer(name)
    if value is None:
        return default
    if not least <= value <= most:
        raise BadRow(COLUMN, f"--{name} is {value}, {_range(least, most)}")
    return value


def _range(least: int, most: int) -> str:
    return f"it must be {least} or more" if most >= 2**30 else f"it must be from {least} to {most}"


def _size(flags: BackendParameters, names: tuple[str, ...]) -> int:
    value = flags.integer(*names)
    if value is None:
        return -1
    if value > 2**20:
        raise BadRow(COLUMN, f"--{names[0]} is {value}, more than any cluster has")
    return value


def _powers_of_two(sizes: Mapping[str, int]) -> None:
    """All sizes but the pipeline's have to be."""
    for key, value in sizes.items():
        if key != "pp" and value > 0 and value & (value - 1):
            raise BadRow(COLUMN, f"--{PARALLEL[key][0]} is {value}, it must be a power of two")


def _fraction(flags: BackendParameters, env: Mapping[str, str]) -> float:
    given = flags.number(FRACTION)
    if given is not None:
        if not 0 < given <= 1:
            raise BadRow(COLUMN, f"--{FRACTION} is {given:g}, it must be above 0 and at most 1")
        return given
    raw = env.get(FRACTION_ENV)
    if raw is None:
        return DEFAULT_FRACTION
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise BadRow("env", f"{FRACTION_ENV} is {raw[:40]!r}, it must be a number above 0 and at most 1")
    return value


# -- values that depend on each other ------------------------------------------------------------------


def _positive_length(tokens: int) -> int:
    if tokens <= 0:
        raise BadRow(COLUMN, f"--max-seq-len is {tokens}, it must be positive")
    return tokens


def _lengths(whole: dict[str, int], given: bool) -> None:
    longest = whole["max-seq-len"]
    if longest <= 0:
        if given:
            _positive_length(longest)
        raise BadRow(
            "backend", "MindIE has no sequence length for this model: its configuration states none",
            "set --max-seq-len, or choose another backend",
        )  # fmt: skip
    prefill = whole["max-prefill-tokens"]
    if whole["max-input-token-len"] <= 0:
        whole["max-input-token-len"] = min(longest, prefill) if prefill > 0 else longest
    shortest = whole["max-input-token-len"]
    _within("max-input-token-len", shortest, 1, longest)
    if prefill <= 0:
        whole["max-prefill-tokens"] = longest
    _within("max-prefill-tokens", whole["max-prefill-tokens"], shortest, longest)
    if whole["max-iter-times"] <= 0:
        whole["max-iter-times"] = longest
    _within("max-iter-times", whole["max-iter-times"], 1, longest)


def _batches(whole: dict[str, int]) -> None:
    batch = whole["max-batch-size"]
    _within("max-preempt-count", whole["max-preempt-count"], 0, batch)
    block = whole["cache-block-size"]
    if block & (block - 1):
        raise BadRow(COLUMN, f"--cache-block-size is {block}, it must be a power of two")


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadRow(COLUMN, f"--{name} is {value}, it must be from {least} to {most}")


# -- words, switches, contradictions -------------------------------------------------------------------


def _check_texts(flags: BackendParameters) -> None:
    for name, known in _CHOICES.items():
        value = flags.text(name)
        if value is not None and value not in known:
            raise BadRow(COLUMN, f"--{name} is {value[:40]!r}, it must be one of {', '.join(known)}")
    if flags.text("openai-support") == "":
        raise BadRow(COLUMN, "--openai-support is empty")
    for name in _JSON:
        value = flags.text(name)
        if value is None:
            continue
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(COLUMN, f"--{name} is {value[:40]!r}, not JSON") from None


def _switches(flags: BackendParameters, batch: int) -> None:
    policy = flags.integer("policy-type")
    if policy is not None and policy not in _SPLIT_POLICIES:
        known = ", ".join(str(p) for p in _SPLIT_POLICIES)
        raise BadRow(COLUMN, f"--policy-type is {policy}, it must be one of {known}")
    for name, (switch, default, least, most) in _WHEN_ON.items():
        value = flags.integer(name)
        if not flags.flag(switch):
            continue
        if value is None and default < least:
            raise BadRow(COLUMN, f"--{switch} needs --{name}")
        most = batch if name == "split-start-batch-size" else most
        value = default if value is None else value
        if not least <= value <= most:
            raise BadRow(COLUMN, f"--{name} is {value}, {_range(least, most)}")
        if name == "split-chunk-tokens" and value % 16:
            raise BadRow(COLUMN, f"--{name} is {value}, it must be a multiple of 16")


def _exclusive(flags: BackendParameters, dp: int) -> None:
    on = {
        "split": flags.flag("enable-split"),
        "memory decoding": flags.flag("enable-memory-decoding"),
        "lookahead": flags.flag("enable-lookahead"),
        "multi-token prediction": flags.flag("enable-multi-token-prediction"),
        "prefix caching": flags.flag("enable-prefix-caching"),
        "rope scaling": _given(flags, "rope-scaling"),
        "data parallelism": dp > 1,
    }
    for one, others in _EXCLUSIVE:
        for other in others:
            if on[one] and on[other]:
                raise BadRow(
                    COLUMN, f"{one} and {other} exclude each other in MindIE", "turn one of them off"
                )
