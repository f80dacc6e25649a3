"""Documents of `gpustackd apply`: YAML or JSON text as checked values, without a database.

A file holds one document or several, each a map with its `kind`; a list of documents counts as several.
Fields are the columns of the kind's table; keys that start with `x-` are ignored. `null` gives a column its
default; a field that is missing leaves the column as it is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpustackd.errors import Refused
from gpustackd.store.documents.fields import kind_of
from gpustackd.store.documents.kinds import GPU, KINDS, DocumentKind

IGNORED_PREFIX = "x-"


@dataclass(frozen=True, slots=True)
class Document:
    """One checked document."""

    kind: DocumentKind
    number: int
    file: str
    values: Mapping[str, Any]
    """By column, null replaced by the column's default."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Column -> the name of the row it refers to."""
    gpus: tuple[Mapping[str, Any], ...] | None = None
    """GPUs of a Worker; None = the document does not list them."""

    @property
    def name(self) -> str:
        """What messages call it; a model file, which has no name, goes by its worker and model or hash."""
        if "name" in self.values:
            return str(self.values["name"])
        parts = (self.references.get(c) or self.values.get(c) for c in self.kind.identity)
        return ":".join(str(p) for p in parts)

    @property
    def where(self) -> str:
        """File, number, kind and name, for messages."""
        return f"{self.file}, document {self.number} ({self.kind.name} {self.name})"


def refuse(where: str, problem: str, remedy: str = "") -> Refused:
    """The refusal of one document. `where` names file, document and, if known, kind, name and field."""
    return Refused(f"{where}: {problem}", remedy)


def read_documents(text: str, file: str) -> list[Document]:
    """Check a whole file. Raises one Refused that lists everything wrong with it, a line each."""
    problems: list[str] = []
    documents: list[Document] = []
    for number, raw in enumerate(_parse(text, file), 1):
        if raw is not None:
            documents.extend(_check(raw, number, file, problems))
    problems += _duplicates(documents)
    if problems:
        raise Refused("\n".join(problems), f"nothing of {file} was applied; fix it and apply it again")
    return documents


def _check(raw: Any, number: int, file: str, problems: list[str]) -> Iterator[Document]:
    where = f"{file}, document {number}"
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: must be a map with a kind, not {kind_of(raw)}")
        return
    kind = KINDS.get(raw["kind"]) if isinstance(raw.get("kind"), str) else None
    if kind is None:
        given = f"kind {raw['kind']!r} is not known" if "kind" in raw else "has no kind"
        problems.append(f"{where}: {given}; use one of {', '.join(KINDS)}")
        return
    called = f" {raw['name'][:100]}" if isinstance(raw.get("name"), str) else ""
    where = f"{where} ({kind.name}{called})"
    before = len(problems)
    body = {k: v for k, v in raw.items() if k != "kind" and not (kind.name == "Worker" and k == "gpus")}
    values, references = _fields(kind, body, where, problems)
    gpus = (
        _gpus(raw["gpus"], where, problems) if kind.name == "Worker" and raw.get("gpus") is not None else None
    )
    if len(problems) == before:
        yield Document(kind, number, file, values, references, gpus)


def _fields(
    kind: DocumentKind, raw: Mapping[Any, Any], where: str, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    references: dict[str, str] = {}
    for key, given in raw.items():
        try:
            if key in kind.references:
                column, _ = kind.references[key]
                if given is None:
                    values[column] = None
                else:
                    references[column] = KINDS["Cluster"].fields["name"](given)
            elif key in kind.fields:
                values[key] = kind.defaults.get(key) if given is None else kind.fields[key](given)
            elif not str(key).startswith(IGNORED_PREFIX):
                problems.append(f"{where}, {key}: no such field{_hint(str(key), kind)}")
        except ValueError as error:
            problems.append(f"{where}, {key}: {error}")
    for key, (column, _) in kind.references.items():
        if column in references and column in values and key in raw:
            problems.append(f"{where}: give {key} or {column}, not both")
    for column in kind.required:
        if column not in raw and values.get(column) is None and column not in references:
            names = [k for k, (c, _) in kind.references.items() if c == column]
            problems.append(f"{where}: {' or '.join([*names, column])} is missing")
        elif column in values and values[column] is None:
            problems.append(f"{where}, {column}: must not be null")
    return values, references


def _gpus(raw: Any, where: str, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(raw, list):
        problems.append(f"{where}, gpus: must be a list, not {kind_of(raw)}")
        return ()
    gpus: dict[tuple[str, int], Mapping[str, Any]] = {}
    for n, item in enumerate(raw):
        at = f"{where}, gpus[{n}]"
        if not isinstance(item, Mapping):
            problems.append(f"{at}: must be a map, not {kind_of(item)}")
            continue
        before = len(problems)
        values, _ = _fields(GPU, item, at, problems)
        if len(problems) > before:
            continue
        key = (values["type"], values["index"])
        if key in gpus:
            problems.append(f"{at}: {key[0]}:{key[1]} is listed twice")
        gpus[key] = values
    return tuple(gpus.values())


def _duplicates(documents: Iterable[Document]) -> list[str]:
    seen: dict[tuple[Any, ...], Document] = {}
    problems = []
    for d in documents:
        identity = tuple(d.references.get(c) or d.values.get(c) for c in d.kind.identity)
        first = seen.setdefault((d.kind.name, *identity), d)
        if first is not d:
            problems.append(f"{d.where}: document {first.number} is about the same row")
    return problems


def _hint(key: str, kind: DocumentKind) -> str:
    known = [*kind.fields, *kind.references, *(["gpus"] if kind.name == "Worker" else [])]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f" of a {kind.name}"


# --- text ---------------------------------------------------------------------------------------------------


def _parse(text: str, file: str) -> Iterator[Any]:
    """The documents of a file, unchecked. A file that starts like JSON is read as JSON if possible."""
    documents: list[Any] | None = None
    if text.lstrip()[:1] in ("{", "["):
        try:
            documents = list(_json(text))
        except (ValueError, RecursionError):
            documents = None
    if documents is None:
        try:
            documents = list(yaml.load_all(text, Loader=_Loader))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            said = " ".join(str(error).split()).replace('"<unicode string>", ', "")
            raise refuse(
                file, f"is neither YAML nor JSON: {said}", "fix the text; nothing was applied"
            ) from None
    for item in documents:
        if isinstance(item, list):
            yield from item
        else:
            yield item


def _json(text: str) -> Iterator[Any]:
    """One JSON text, or several one after another."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        yield value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is written twice")
    return mapping


_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """The safe loader, which rejects a key that is written twice instead of taking the last."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: Any) -> None:
        # each node once, before merge keys add what the document overrides
        if id(node) not in self._checked:
            self._checked.add(id(node))
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key {key.value!r} is written twice", key.start_mark
                        )
                    seen.add(key.value)
        super().flatten_mapping(node)
