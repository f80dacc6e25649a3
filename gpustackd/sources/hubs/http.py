"""Bounded GETs to a model hub: limits on size and time, ranges that are checked, errors with a remedy."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache

import httpx2

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.bounded_json import too_large

CONNECT_SECONDS = 5.0
REDIRECTS = 5


def hub_client(timeout: float) -> httpx2.AsyncClient:
    """A client for hubs; proxies of the environment count, except for a hub on this host. httpx keeps the
    token from other hosts when it follows a redirect to a content network."""
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
        follow_redirects=True,
        max_redirects=REDIRECTS,
        limits=httpx2.Limits(max_connections=32, max_keepalive_connections=8),
        verify=_certificates(),
        mounts=dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]")),
    )


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """The trusted certificates, which take a tenth of a second to load: once in a process."""
    return httpx2.create_ssl_context()


class HubRequest:
    """GETs to one hub. `hub` is its name in messages, `access` what to do where it refuses."""

    def __init__(self, client: httpx2.AsyncClient, hub: str, headers: Mapping[str, str], access: str) -> None:
        self._client = client
        self._hub = hub
        self._access = access
        # a compressed answer could unfold to any size
        self._headers = {**headers, "accept-encoding": "identity"}

    async def whole(self, url: str, name: str, limit: int, params: Mapping[str, str] | None = None) -> bytes:
        """The body of an answer, at most `limit` bytes of it."""
        return await self._get(url, name, limit, params, {}, 200)

    async def part(
        self, url: str, name: str, start: int, length: int, params: Mapping[str, str] | None = None
    ) -> bytes:
        """A range of a file. A hub that ignores ranges is refused before the file comes."""
        wanted = {"range": f"bytes={start}-{start + length - 1}"}
        return await self._get(url, name, length, params, wanted, 206)

    async def _get(
        self,
        url: str,
        name: str,
        limit: int,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        expected: int,
    ) -> bytes:
        try:
            async with self._client.stream(
                "GET", url, params=params, headers={**self._headers, **headers}
            ) as answer:
                if answer.status_code == 200 and expected == 206:
                    size = answer.headers.get("content-length", "")
                    if not (size.isdigit() and int(size) <= limit):
                        raise ModelUnreadable(
                            "no_ranges",
                            f"{self._hub} does not serve parts of {name}",
                            "check its address or proxy",
                        )
                elif answer.status_code != expected:
                    raise self._refused(answer, name)
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise self._broken(name, "a compressed body")
                return await self._body(answer, name, limit)
        except httpx2.TimeoutException:
            raise timed_out(self._hub, name) from None
        except httpx2.TooManyRedirects:
            raise self._broken(name, "an endless chain of redirects") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.CookieConflict) as e:
            raise self._broken(name, f"an unusable address: {str(e)[:80]}") from None
        except httpx2.HTTPError as e:
            raise ModelUnreadable(
                "hub_unreachable",
                f"{self._hub} cannot be reached for {name}: {str(e)[:120] or type(e).__name__}",
                "check the network, the endpoint and the proxy settings",
                retryable=True,
            ) from None

    async def _body(self, answer: httpx2.Response, name: str, limit: int) -> bytes:
        stated = answer.headers.get("content-length", "")
        if stated.isdigit() and int(stated) > limit:
            raise too_large(name, int(stated), limit)
        chunks: list[bytes] = []
        got = 0
        async for chunk in answer.aiter_raw():
            got += len(chunk)
            if got > limit:
                raise too_large(name, got, limit)
            chunks.append(chunk)
        return b"".join(chunks)

    def _refused(self, answer: httpx2.Response, name: str) -> ModelUnreadable:
        status = answer.status_code
        said = answer.headers.get("x-error-code", "")
        if said == "GatedRepo" or status in {401, 403}:
            return ModelUnreadable(
                "hub_unauthorized",
                f"{self._hub} refuses {name} ({status}{' ' + said if said else ''})",
                self._access,
            )
        if said == "RevisionNotFound":
            return ModelUnreadable("revision_not_found", f"{self._hub} has no such revision of {name}")
        if status == 404:
            return ModelUnreadable("hub_not_found", f"{self._hub} does not have {name}", "check the name")
        if status == 429:
            after = answer.headers.get("retry-after", "")[:20]
            return ModelUnreadable(
                "hub_busy",
                f"{self._hub} limits the rate of requests (429{f', retry after {after} s' if after else ''})",
                "wait; a token raises the limit",
                retryable=True,
            )
        return ModelUnreadable(
            "hub_error",
            f"{self._hub} answered {name} with status {status}",
            retryable=status >= 500 or status == 408,
        )

    def _broken(self, name: str, what: str) -> ModelUnreadable:
        return ModelUnreadable("hub_broken", f"{self._hub} answered {name} with {what}", retryable=True)


def timed_out(hub: str, name: str) -> ModelUnreadable:
    """The error for an answer that did not come in time."""
    return ModelUnreadable(
        "hub_timeout", f"{hub} did not answer in time for {name}", "check the network", retryable=True
    )


class HubFiles:
    """The files of one repository at one revision on a hub (`contents.ModelFiles`)."""

    def __init__(
        self,
        request: HubRequest,
        key: str,
        label: str,
        sizes: Mapping[str, int],
        address: Callable[[str], str],
    ) -> None:
        self._request = request
        self._address = address
        self.key = key
        self.label = label
        self.sizes = sizes
        self.is_local = False

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        if (size := self.sizes.get(name, 0)) > limit:
            raise too_large(f"{self.label}/{name}", size, limit)
        return await self._request.whole(self._address(name), f"{self.label}/{name}", limit)

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
        return await self._request.part(self._address(name), f"{self.label}/{name}", start, length)
