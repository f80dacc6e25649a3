"""Models on ModelScope, or on any server with its API (`GPUSTACKD_MODELSCOPE_ENDPOINT`).

Relied on, of its public REST API:

- `GET /api/v1/models/{owner}/{name}/repo/files?Revision=&Recursive=true` answers
  `{"Code": 200, "Success": true, "Data": {"Files": [{"Path", "Size", "Type": "blob" | "tree",
  "Revision"}], "LatestCommitter": {...}}}`; a refusal has another `Code` and a `Message`, mostly with
  an HTTP status of 404 or 401.
- `GET /api/v1/models/{owner}/{name}/repo?Revision=&FilePath=` answers the raw file and takes `Range`.

The default revision is `master`. A token is no setting of gpustackd, so that only public models are read.
"""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import urlencode

import httpx2

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats import bounded_json
from gpustackd.sources.hubs.http import HubFiles, HubRequest
from gpustackd.sources.hubs.huggingface import bad_name, broken

ENDPOINT = "https://www.modelscope.cn"
NAME = "ModelScope"
ACCESS = "check the name; only public models are read from this hub"
REVISION = "master"

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,127}/[\w][\w.-]{0,127}")


class ModelScope:
    """One hub. `endpoint` None = `https://www.modelscope.cn`."""

    def __init__(self, client: httpx2.AsyncClient, endpoint: str | None = None) -> None:
        self.endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._name = NAME if self.endpoint == ENDPOINT else f"{NAME} at {self.endpoint}"
        self._request = HubRequest(client, self._name, {"user-agent": "gpustackd"}, ACCESS)

    async def listing(self, model_id: str, revision: str | None) -> bytes:
        """The hub's answer about all files of a revision."""
        if not _MODEL_ID.fullmatch(model_id) or ".." in model_id:
            raise bad_name(model_id)
        url = f"{self.endpoint}/api/v1/models/{model_id}/repo/files"
        asked = {"Revision": revision or REVISION, "Recursive": "true"}
        return await self._request.whole(url, model_id, bounded_json.API.size, asked)

    def files(self, model_id: str, revision: str | None, listing: bytes) -> HubFiles:
        """Files of a model from its listing. Raise ModelUnreadable where it is a refusal or no listing."""
        document = bounded_json.parse_object(listing, f"the listing of {model_id}", bounded_json.API)
        data = document.get("Data")
        if document.get("Success") is False or document.get("Code") not in {200, None}:
            said = str(document.get("Message"))[:120]
            raise ModelUnreadable("hub_not_found", f"{self._name} does not have {model_id}: {said}")
        files = data.get("Files") if isinstance(data, dict) else None
        if not isinstance(files, list):
            raise broken(self._name, model_id)
        sizes = dict(pair for f in files if (pair := _file(f)))
        # a branch moves: what was listed is the revision
        digest = sha256(repr(sorted(sizes.items())).encode()).hexdigest()[:32]
        at = revision or REVISION
        base = f"{self.endpoint}/api/v1/models/{model_id}/repo"

        def address(path: str) -> str:
            return f"{base}?{urlencode({'Revision': at, 'FilePath': path})}"

        key = f"model_scope:{self.endpoint}:{model_id}@{at}#{digest}"
        return HubFiles(self._request, key, model_id, sizes, address)


def _file(raw: object) -> tuple[str, int] | None:
    if not isinstance(raw, dict) or raw.get("Type") == "tree":
        return None
    path, size = raw.get("Path"), raw.get("Size")
    if not isinstance(path, str) or not path or not isinstance(size, int) or isinstance(size, bool):
        return None
    return (path, size) if 0 <= size < 2**62 else None
