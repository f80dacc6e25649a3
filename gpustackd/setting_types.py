"""Value types of the settings: database and web URLs, the HTTP address, time zones, numbers with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _database_url(value: SecretStr) -> SecretStr:
    scheme, mark, rest = value.get_secret_value().strip().partition("://")
    # `postgresql+asyncpg`, the form of SQLAlchemy, is common in the environment of such clusters
    if not mark or scheme.split("+")[0] not in ("postgresql", "postgres"):
        raise ValueError("must be a URL such as postgresql://user:password@host:5432/database")
    try:
        hosts = urlsplit("postgresql://" + rest).netloc.rpartition("@")[2].split(",")
        readable = all(urlsplit("//" + host).port != 0 for host in hosts)
    except ValueError:
        readable = False
    if not readable:
        raise ValueError("has an unreadable host or port; special characters of a password go in as %xx")
    return SecretStr("postgresql://" + rest)


def _web_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL such as https://huggingface.co")
    return value.rstrip("/")


def _token(value: SecretStr) -> SecretStr:
    """A token as it goes into a header; the line break at the end of a file is removed."""
    text = value.get_secret_value().strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be printable ASCII without spaces, since it goes into a header")
    return SecretStr(text)


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError):  # unknown, outside the folder, a folder
        raise ValueError("must be a time zone such as Europe/Berlin") from None
    return value


@dataclass(frozen=True, slots=True)
class Address:
    """Where the HTTP surface listens. Port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: Any) -> Any:
    """`host:port`, `[v6]:port` or `:port` (every interface) as an Address; `off` as None.

    Raise ValueError for any other string; what is no string passes through.
    """
    if not isinstance(value, str):
        return value
    if value.strip().lower() == "off":
        return None
    host, colon, port = value.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or set(host) & set("[]/@ "):
        raise ValueError("must be host:port, such as 127.0.0.1:9480, or off")
    return Address(host or "0.0.0.0", int(port))  # noqa: S104 - only where it was asked for


def _switch(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _no_switch(value: Any) -> Any:
    # TOML's true would otherwise count as 1
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_no_switch), Field(allow_inf_nan=False)]

Switch = Annotated[bool, BeforeValidator(_switch)]
Lower = BeforeValidator(_lower)
Count = Annotated[int, BeforeValidator(_no_switch), Field(ge=1)]
LONGEST = 10.0 * 365 * 86400
"""Ten years in seconds: what clocks, timers and the database can still add to now."""

Seconds = Annotated[Number, Field(gt=0, le=LONGEST)]
NotNegative = Annotated[Number, Field(ge=0, le=LONGEST)]
Token = Annotated[SecretStr, AfterValidator(_token)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
WebUrl = Annotated[str, AfterValidator(_web_url)]
TimeZone = Annotated[str, AfterValidator(_zone)]
HttpAddress = Annotated[Address | None, BeforeValidator(parse_address)]
