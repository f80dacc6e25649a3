"""Which files of a model are its weights: one format, counted once.

Repositories ship the same weights as safetensors and as pickles, as one file and as shards, under
the names of two loaders (`consolidated*`) or in two precisions (`model.fp16.safetensors`). An engine
loads one of these sets; this module picks it from names and sizes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from gpustackd.errors import ModelUnreadable

FORMATS: tuple[tuple[str, ...], ...] = ((".safetensors",), (".bin",), (".pt", ".pth"))
"""In the order in which engines prefer them."""
INDEXES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json",
           "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin.index.json")  # fmt: skip

_NOT_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?|random_states(_\d+)?|trainer_state)\.(bin|pt|pth)"
)
_VARIANT = re.compile(r"\.(fp16|fp32|bf16|fp8|int8|non_ema|ema)(?=[.-])")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.)")


def pick(sizes: Mapping[str, int], indexes: Mapping[str, Sequence[str]] | None = None) -> tuple[str, ...]:
    """The weight files of one directory, sorted; empty when it holds none.

    `sizes`: file name -> bytes of everything in that directory. `indexes`: index file -> names it lists,
    for those of `INDEXES` that are there; an index goes before the listing. Raise ModelUnreadable
    (`incomplete`, retryable) when a file that the index or the shard numbers promise is missing.
    """
    for suffixes in FORMATS:
        names = [n for n in sizes if n.endswith(suffixes) and not _NOT_WEIGHTS.fullmatch(n)]
        if not names:
            continue
        for index in INDEXES:
            listed = (indexes or {}).get(index)
            if listed and all(n.endswith(suffixes) for n in listed):
                _require_all(listed, sizes, index)
                return tuple(sorted(set(listed)))
        return tuple(sorted(_without_duplicates(names)))
    return ()


def pick_components(
    sizes: Mapping[str, int], components: Iterable[str], indexes: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The weight files of a pipeline: below each component directory, one format per directory.

    `sizes` and `indexes` have paths relative to the model, `components` are top-level directory names.
    """
    wanted = set(components)
    folders: dict[str, dict[str, int]] = {}
    for path, size in sizes.items():
        folder, _, name = path.rpartition("/")
        if folder.partition("/")[0] in wanted:
            folders.setdefault(folder, {})[name] = size
    chosen: list[str] = []
    for folder, files in sorted(folders.items()):
        here = {p.rpartition("/")[2]: n for p, n in indexes.items() if p.rpartition("/")[0] == folder}
        chosen += [f"{folder}/{name}" for name in pick(files, here)]
    return tuple(chosen)


def components_of(model_index: object) -> tuple[str, ...]:
    """Component directories named by a `model_index.json` (object, or list whose first element is one): keys
    that do not start with `_` and whose value is neither null nor a pair of nulls (a part left out)."""
    if isinstance(model_index, list) and model_index:
        model_index = model_index[0]
    if not isinstance(model_index, dict):
        raise ModelUnreadable("bad_model_index", "model_index.json is not a JSON object")
    return tuple(
        key
        for key, value in model_index.items()
        if not key.startswith("_")
        and "/" not in key
        and value is not None
        and not (isinstance(value, list) and value and all(v is None for v in value))
    )


def is_diffusers_index(document: object) -> bool:
    """`model_index.json` of a diffusers pipeline: `_diffusers_version` in the object or in one of a list."""
    several = document if isinstance(document, list) else [document]
    return any(isinstance(d, dict) and "_diffusers_version" in d for d in several)


def names_in_index(document: Mapping[str, object], name: str) -> tuple[str, ...]:
    """File names of a `*.index.json` (`weight_map`: tensor -> file). They are data of strangers: only plain
    names next to the index are accepted. Raise ModelUnreadable (`bad_index`)."""
    weights = document.get("weight_map")
    if not isinstance(weights, dict):
        raise ModelUnreadable("bad_index", f"{name} has no weight_map object")
    files = set()
    for file in weights.values():
        if not isinstance(file, str) or not file or file != PurePosixPath(file).name or file in {".", ".."}:
            raise ModelUnreadable(
                "bad_index", f"{name} names {str(file)[:80]!r}, which is not a file next to it"
            )
        files.add(file)
    return tuple(sorted(files))


def _require_all(listed: Iterable[str], sizes: Mapping[str, int], index: str) -> None:
    missing = sorted(set(listed) - set(sizes))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"{index} names {missing[0]}{more}, missing here"
        raise ModelUnreadable("incomplete", problem, "finish the download", retryable=True)


def _without_duplicates(names: Sequence[str]) -> list[str]:
    """Drop what repeats other files of the same format."""
    native = [n for n in names if not n.startswith("consolidated")]
    chosen = native or list(names)  # Mistral's own format comes alone in some repositories
    if not native and "consolidated.safetensors" in chosen:
        chosen = ["consolidated.safetensors"]
    plain = {n for n in chosen if not _VARIANT.search(n)}
    chosen = [n for n in chosen if n in plain or not _plain_twin(n, plain)]
    # one file and its shards: `model.safetensors` beside `model-00001-of-00003.safetensors`
    shards = [n for n in chosen if _SHARD.search(n)]
    whole = {_SHARD.sub("", n) for n in shards}
    chosen = [n for n in chosen if n not in whole]
    for stem in whole:
        group = [n for n in shards if _SHARD.sub("", n) == stem]
        _require_shards(group)
    return chosen


def _plain_twin(name: str, plain: set[str]) -> bool:
    """Whether the same weights lie there without a precision in the name (whole or in shards)."""
    twin = _VARIANT.sub("", name)
    stem = _SHARD.sub("", twin)
    return any(_SHARD.sub("", other) == stem for other in plain)


def _require_shards(group: Sequence[str]) -> None:
    numbered = {name: _SHARD.search(name) for name in group}
    totals = {int(m.group(1)) for m in numbered.values() if m}
    if len(totals) == 1 and len(group) < (total := totals.pop()):
        problem = f"only {len(group)} of {total} files like {group[0]} are here"
        raise ModelUnreadable("incomplete", problem, "finish the download", retryable=True)
