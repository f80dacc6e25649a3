"""Models on the Hugging Face Hub, or on any server with its API (`HF_ENDPOINT`).

Addresses, headers and name checks come from `huggingface_hub`; the requests are our own, because those of the
library block a thread, retry on their own account and have no limit on what they read. One request lists
a revision with all file sizes and resolves it to a commit, under which everything else is cached.
"""

from __future__ import annotations

from urllib.parse import quote

import httpx2

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats import bounded_json
from gpustackd.sources.hubs.http import HubFiles, HubRequest

ENDPOINT = "https://huggingface.co"
NAME = "Hugging Face"
ACCESS = "check the name, set a token (GPUSTACKD_HUGGINGFACE_TOKEN), or request access on the hub"


class HuggingFace:
    """One hub. `endpoint` None = `https://huggingface.co`; the token goes to no other host."""

    def __init__(
        self, client: httpx2.AsyncClient, endpoint: str | None = None, token: str | None = None
    ) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, not in __all__

        self.endpoint = (endpoint or ENDPOINT).rstrip("/")
        # False: never a token that happens to be in this user's home
        headers = build_hf_headers(token=token or False, library_name="gpustackd")
        self._name = NAME if self.endpoint == ENDPOINT else f"{NAME} at {self.endpoint}"
        self._request = HubRequest(client, self._name, headers, ACCESS)

    async def listing(self, repo: str, revision: str | None) -> bytes:
        """The hub's answer about a revision: JSON with `sha` and `siblings` with sizes."""
        checked_name(repo)
        at = f"/revision/{quote(revision, safe='')}" if revision else ""
        url = f"{self.endpoint}/api/models/{repo}{at}"
        label = f"{repo}@{revision}" if revision else repo
        return await self._request.whole(url, label, bounded_json.API.size, {"blobs": "true"})

    def files(self, repo: str, revision: str | None, listing: bytes) -> HubFiles:
        """Files of a repository from its listing, at the commit it names. Raise ModelUnreadable
        (`hub_broken`) where it is no listing."""
        from huggingface_hub import hf_hub_url

        document = bounded_json.parse_object(listing, f"the listing of {repo}", bounded_json.API)
        commit = document.get("sha")
        siblings = document.get("siblings")
        if not isinstance(commit, str) or not commit or len(commit) > 200 or not isinstance(siblings, list):
            raise broken(self._name, repo)
        sizes = {name: size for s in siblings if (pair := _sibling(s)) for name, size in (pair,)}

        def address(name: str) -> str:
            return hf_hub_url(repo, name, revision=commit, endpoint=self.endpoint)

        return HubFiles(self._request, f"huggingface:{self.endpoint}:{repo}@{commit}", repo, sizes, address)


def checked_name(repo: str) -> str:
    """A repository name out of a row, before it becomes part of an address."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise bad_name(repo) from None
    return repo


def bad_name(repo: str) -> ModelUnreadable:
    """The error for a name that no repository can have."""
    return ModelUnreadable(
        "bad_name", f"{repo[:100]!r} is not the name of a repository", "write it as owner/name"
    )


def broken(hub: str, repo: str) -> ModelUnreadable:
    """The error for a listing without what a listing has."""
    return ModelUnreadable(
        "hub_broken", f"{hub} answered {repo} with something other than a listing", retryable=True
    )


def _sibling(raw: object) -> tuple[str, int] | None:
    if not isinstance(raw, dict) or not isinstance(name := raw.get("rfilename"), str):
        return None
    size = raw.get("size")
    if not isinstance(size, int) and isinstance(lfs := raw.get("lfs"), dict):
        size = lfs.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**62:
        return None
    return name, size
