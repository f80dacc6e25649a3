"""The hub of the tests speaks as a real one does: the public client of Hugging Face reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyio import to_thread
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

from tests.hub import Hub, Repo, repo_of, size_of

pytestmark = pytest.mark.anyio
NAME = "owner/model"


async def test_the_public_client_lists_reads_and_downloads_from_it(tmp_path: Path) -> None:
    async with Hub({NAME: repo_of({"a": 1}, [("w", "BF16", [64, 64])])}) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        info = await to_thread.run_sync(lambda: api.model_info(NAME, files_metadata=True))
        assert info.sha == hub.repos[NAME].commit
        sizes = {s.rfilename: s.size for s in info.siblings or []}
        assert sizes == {n: size_of(f) for n, f in hub.repos[NAME].files.items()}
        tree = await to_thread.run_sync(lambda: list(api.list_repo_tree(NAME)))
        assert {f.path for f in tree} == set(sizes)
        header = await to_thread.run_sync(
            lambda: api.parse_safetensors_file_metadata(NAME, "model.safetensors", token=False)
        )
        assert header.tensors["w"].shape == [64, 64]
        url = hf_hub_url(NAME, "model.safetensors", endpoint=hub.url)
        meta = await to_thread.run_sync(lambda: get_hf_file_metadata(url, token=False, endpoint=hub.url))
        assert (meta.size, meta.commit_hash) == (sizes["model.safetensors"], info.sha)
        path = await to_thread.run_sync(
            lambda: hf_hub_download(NAME, "config.json", cache_dir=tmp_path, endpoint=hub.url, token=False)
        )
        assert json.loads(Path(path).read_text()) == {"a": 1}


async def test_the_public_client_tells_its_refusals_apart() -> None:
    async with Hub({NAME: Repo({"config.json": b"{}"}), "owner/gated": Repo({}, gated=True)}) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        with pytest.raises(RepositoryNotFoundError):
            await to_thread.run_sync(lambda: api.model_info("owner/none"))
        with pytest.raises(GatedRepoError):
            await to_thread.run_sync(lambda: api.model_info("owner/gated"))
        absent = hf_hub_url(NAME, "absent.json", endpoint=hub.url)
        with pytest.raises(EntryNotFoundError):
            await to_thread.run_sync(lambda: get_hf_file_metadata(absent, token=False, endpoint=hub.url))
