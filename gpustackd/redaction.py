"""Masks secrets in text: passwords in URLs, bearer tokens, values under secret names."""

from __future__ import annotations

import re
from functools import lru_cache

MASK = "***"

_SECRET_NAME = re.compile(
    r"passw|pwd|secret|credential|authori[sz]ation|cookie|api_?key|private_?key|(^|_)(auth_?|bearer_?)?token$"
)
_USERINFO = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")
_SECRET_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:password|passwd|secret|token|api_?key|signature|credential))=)[^&#\s\"'<>;]+"
)
SECRET_MARKS = ("://", "hf_", "earer ", "EARER ", "asic ", "ASIC ")
"""Text without any of these has nothing for `mask_text` to mask."""
_BEARER = re.compile(r"\b([Bb]earer|BEARER|[Bb]asic|BASIC) +[\w.~+/=-]{8,}")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")


@lru_cache(maxsize=2048)
def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret, such as `worker_token` or `PGPASSWORD`."""
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def mask_url(url: str) -> str:
    """The URL without its password and without secret query parameters; never raises.

    A password with unescaped `/`, `?` or `#` makes the URL invalid and ends the authority too early;
    it is masked all the same, up to the last `@`.
    """
    start = url.find("://") + 3
    if start >= 3:
        authority_end = min((i for c in "/?#" if (i := url.find(c, start)) >= 0), default=len(url))
        at = url.rfind("@", start, authority_end)
        if at < 0 and not _is_host(url[start:authority_end]):
            at = url.rfind("@", authority_end)
        colon = url.find(":", start, at) if at >= 0 else -1
        if colon >= 0:
            url = f"{url[: colon + 1]}{MASK}{url[at:]}"
    return _SECRET_PARAMETER.sub(rf"\1{MASK}", url)


def _is_host(authority: str) -> bool:
    """Whether this is host, host:port or a comma-separated list of them, with no user before it."""
    return all(re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:@]*)(:\d*)?", part) for part in authority.split(","))


def mask_text(text: str) -> str:
    """Text with the secrets that have a recognisable form masked: URLs, bearer headers, hub tokens."""
    if "://" in text:
        # a URL in running text ends at a blank or a quote, so a password may not hold these unescaped
        text = _USERINFO.sub(_mask_userinfo, text)
        text = _SECRET_PARAMETER.sub(rf"\1{MASK}", text)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(f"hf_{MASK}", text)
    return _BEARER.sub(rf"\1 {MASK}", text)


def _mask_userinfo(found: re.Match[str]) -> str:
    user, colon, _ = found[0].partition(":")
    return f"{user}:{MASK}@" if colon else found[0]
