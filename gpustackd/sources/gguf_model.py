"""Facts of a GGUF model: its own header, and those of the projector, draft model and adapters loaded beside
it.

A model's own header has to be readable. What is loaded beside it and cannot be read counts 0, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.origin import FileOrigin, adapter_origins, draft_origin
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.llama_cpp.flags import ExtraFiles, extra_files
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.estimate.llama_cpp.classify import categories_of, not_a_model
from gpustackd.estimate.llama_cpp.need import header_digest
from gpustackd.sources.access import SourceAccess
from gpustackd.sources.contents import ModelFiles
from gpustackd.sources.gguf_files import SUFFIX, GgufFiles, named
from gpustackd.sources.local_files import PathAbsent

_READ_HERE = "the header of a GGUF file is read on this host: make the path readable here, or use a hub"


class GgufModels:
    """One per reader."""

    def __init__(self, access: SourceAccess) -> None:
        self._access = access
        self._gguf = GgufFiles(access)

    async def facts(self, spec: ModelSpec, origin: FileOrigin) -> ModelFacts:
        """Facts of one model. Raise ModelUnreadable where its header cannot be read, or is no model's."""
        files, name, choice = await _open(spec.weight_file or "", origin, self._access)
        header = await self._gguf.facts(files, name)
        if (why := not_a_model(header)) is not None:
            raise ModelUnreadable("not_a_model", f"{files.label}/{name}: {why}", "name the model's own file")
        companions = _Companions(spec, origin, files, name, self._access, self._gguf)
        header = await companions.added_to(header)
        warnings = (*choice, *header.warnings, *companions.warnings)
        categories = spec.categories or categories_of(header)
        decisive = f"{header_digest(header)}|{categories}|{warnings}"
        return ModelFacts(
            weight_bytes=header.file_bytes,
            gguf=header,
            categories=categories,
            warnings=warnings,
            digest=sha256(decisive.encode()).hexdigest(),
        )


async def _open(
    wanted: str, origin: FileOrigin, access: SourceAccess
) -> tuple[ModelFiles, str, tuple[str, ...]]:
    """The listing that a file is in, the file's name there, and warnings about the choice."""
    if origin.source is not Source.LOCAL_PATH:
        files = await access.open(origin)
        name, warnings = named(files.sizes, wanted, files.label)
        return files, name, warnings
    folder, _, name = origin.name.rpartition("/")
    if not origin.name.startswith("/"):
        raise ModelUnreadable(
            "bad_path", f"local_path {origin.name!r} is not absolute", "give the path from the root"
        )
    try:
        files = await access.open(FileOrigin(Source.LOCAL_PATH, folder or "/"))
    except PathAbsent as e:
        raise PathAbsent(e.code, e.problem, _READ_HERE, retryable=True) from None
    if name not in files.sizes:
        raise PathAbsent("path_absent", f"{origin.name} is not on this host", _READ_HERE, retryable=True)
    return files, name, ()


class _Companions:
    """What is loaded beside one model. `warnings` names what is not counted."""

    def __init__(
        self,
        spec: ModelSpec,
        origin: FileOrigin,
        files: ModelFiles,
        name: str,
        access: SourceAccess,
        gguf: GgufFiles,
    ) -> None:
        self._spec = spec
        self._origin = origin
        self._files = files
        self._folder = name.rpartition("/")[0]
        self._access = access
        self._gguf = gguf
        self.warnings: list[str] = []

    async def added_to(self, header: GgufFacts) -> GgufFacts:
        """The header with its projector, its draft model and its adapters."""
        flags = self._flags()
        projector = draft = None
        if (wanted := self._projector(flags)) is not None:
            projector = await self._read("projector", wanted)
        if (wanted := flags.draft or draft_origin(self._spec)) is not None:
            draft = await self._read("draft model", wanted)
            if draft is not None and (why := not_a_model(draft)) is not None:
                self.warnings.append(f"draft model {wanted} is not counted: {why}")
                draft = None
        adapters = [await self._read("adapter", wanted) for wanted in self._adapters(flags)]
        if projector is None and draft is None and not adapters:
            return header
        return replace(
            header,
            projector=projector,
            draft=draft,
            adapters=tuple(a for a in adapters if a is not None),
        )

    def _flags(self) -> ExtraFiles:
        try:
            return extra_files(parse_flags(self._spec.backend_parameters))
        except BadRow:  # the estimate refuses the row with this
            return ExtraFiles()

    def _projector(self, flags: ExtraFiles) -> str | FileOrigin | None:
        """The file that the flags name; else, of a hub's repository, the last one whose name says projector
        (the one that is downloaded)."""
        if flags.no_projector:
            return None
        if flags.projector is not None:
            return flags.projector
        if self._origin.source is Source.LOCAL_PATH:
            return None
        return max((n for n in self._files.sizes if _is_projector(n)), default=None)

    def _adapters(self, flags: ExtraFiles) -> Iterator[str | FileOrigin]:
        yield from flags.adapters
        yield from adapter_origins(self._spec)

    async def _read(self, what: str, wanted: str | FileOrigin) -> GgufFacts | None:
        shown = wanted if isinstance(wanted, str) else wanted.name
        try:
            files, name = await self._open(wanted)
            return await self._gguf.facts(files, name)
        except ModelUnreadable as e:
            self.warnings.append(f"{what} {shown[:200]} is not counted: {e.problem}")
            return None

    async def _open(self, wanted: str | FileOrigin) -> tuple[ModelFiles, str]:
        if isinstance(wanted, FileOrigin) and wanted.source is not Source.LOCAL_PATH:
            # a file in a repository may be written as one path: owner/name/file.gguf
            owner, _, rest = wanted.name.partition("/")
            repo, _, inside = rest.partition("/")
            files = await self._access.open(replace(wanted, name=f"{owner}/{repo}" if repo else owner))
            return files, named(files.sizes, inside or f"*{SUFFIX}", files.label)[0]
        path = wanted if isinstance(wanted, str) else wanted.name
        if path.startswith("/"):
            files, name, _ = await _open(path, FileOrigin(Source.LOCAL_PATH, path), self._access)
            return files, name
        # a bare name is beside the model
        sibling = f"{self._folder}/{path}" if self._folder else path
        name = sibling if sibling in self._files.sizes else path
        return self._files, named(self._files.sizes, name, self._files.label)[0]


def _is_projector(name: str) -> bool:
    return name.endswith(SUFFIX) and "mmproj" in name.rpartition("/")[2]
