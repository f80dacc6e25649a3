"""Settings of one process: built-in < TOML file < environment < flags, checked whole before the start."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Check
from gpustackd.errors import UsageError
from gpustackd.setting_types import (
    LONGEST,
    Address,
    Count,
    DatabaseUrl,
    HttpAddress,
    Lower,
    NotNegative,
    Number,
    Seconds,
    Switch,
    TimeZone,
    Token,
    WebUrl,
)

PREFIX = "GPUSTACKD_"
CONFIG = "GPUSTACKD_CONFIG"
TEST_PREFIXES = ("GPUSTACKD_TEST_", "GPUSTACKD_PEER_")
"""Variables of the test suite: neither settings nor mistakes."""

PG_VARIABLES = ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
"""Any of these says where a database is; the driver reads them, and PGPASSWORD, PGPASSFILE, PGSSL*."""

CLUSTER_PREFIX = "GPUSTACK_"
CLUSTER_SETTINGS = ("scheduler_", "worker_heartbeat_", "model_instance_")
"""Settings that begin so have the prefix `GPUSTACK_`: operators of such clusters have set them already."""

GROUP_VARIABLES = (
    "GPUSTACK_SCHEDULER_PAIRING_AFFINITY_MAX_SCORE",
    "GPUSTACK_SCHEDULER_TOPOLOGY_PROXIMITY_MAX_SCORE",
    "GPUSTACK_SCHEDULER_GROUP_PAIR_LOCALITY_WEIGHT",
    "GPUSTACK_SCHEDULER_GROUP_FILE_LOCALITY_WEIGHT",
    "GPUSTACK_SCHEDULER_GROUP_CANDIDATE_LIMIT",
    "GPUSTACK_SCHEDULER_GATHER_BLOCKED_DWELL_SECONDS",
)
"""How groups of instances are placed together, which gpustackd does not do: ignored, with a warning."""
IGNORED = "gpustackd does not place groups of instances together, so these settings have no effect"


class Settings(BaseModel):
    """Every setting, once, immutable. Durations are seconds. Made by `load`, never by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: DatabaseUrl | None = None
    listen_database_url: DatabaseUrl | None = None
    pool_size: Annotated[Count, Field(le=1000)] = 5
    rescan_interval: Seconds = 180.0
    concurrency: Annotated[Count, Field(le=256)] = 4
    lease: Annotated[Number, Field(ge=1, le=LONGEST)] = 30.0
    pickup_window: Seconds = 60.0
    unreachable_window: Seconds = 900.0
    """How long to wait for an instance that nobody reports on a worker that sends heartbeats."""
    restart_backoff: Seconds = 10.0
    """Before the second restart of an instance that fails; doubled for each later one, up to 30 times."""
    stable_window: Seconds = 600.0
    """An instance that ran for this long has its earlier failures forgotten."""
    avoid_window: Seconds = 1800.0
    """For how long any other place is preferred to one where an instance failed again and again."""
    drain_window: NotNegative = 0.0
    """How long a surplus replica of a model without roles drains before it is deleted; for members of a group
    `scheduler_drain_window_seconds` says it."""
    placement_strategy: Annotated[Strategy, Lower] = Strategy.SPREAD
    queue_order: Annotated[Literal["priority", "decreasing"], Lower] = "priority"
    """Which waiting instance is decided first: by priority and age, or the largest within a priority."""
    commit_check: Annotated[Check, Lower] = Check.FITS
    foreign_memory: Annotated[Literal["ignore", "avoid"], Lower] = "ignore"
    http: HttpAddress = Address("127.0.0.1", 9480)
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = "info"
    log_format: Annotated[Literal["auto", "json", "text"], Lower] = "auto"
    huggingface_token: Token | None = None
    hf_endpoint: WebUrl | None = None
    modelscope_endpoint: WebUrl | None = None
    worker_token: Token | None = None
    timezone: TimeZone | None = None
    """Calendar of scaling windows; None = the database's."""
    replica: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name in logs and records; None = host and process id."""
    prefer_mean_over_gpus: Switch = False
    """`binpack` scores several GPUs of one worker by their mean, not by the best of them."""
    prefer_dominant_resource: Switch = False
    """`binpack` scores a GPU by the scarcer of RAM and VRAM, not by a weighted mean of both."""
    prefer_draft_weights: Switch = False
    """The claim of a model with a draft model counts the draft's weights."""

    scheduler_scale_up_placement_max_score: Number = 100.0
    scheduler_scale_up_locality_max_score: Number = 5.0
    """0 or less: where a model's files are has no weight."""
    scheduler_drain_window_seconds: Number = 60.0
    """0 or less deletes at once."""
    scheduler_scale_down_status_max_score: Number = 100.0
    scheduler_scale_down_offload_max_score: Number = 10.0
    scheduler_scale_down_placement_max_score: Number = 1.0
    scheduler_scale_down_pairing_max_score: Annotated[Number, Field(lt=50)] = 20.0
    """Below 50: half the status score, so that pairing never outranks a state."""
    model_instance_reschedule_grace_period: NotNegative = 300.0
    worker_heartbeat_interval: Seconds = 30.0
    worker_heartbeat_grace_period: Seconds = 150.0

    pg_environment: bool = False
    """Whether PG* variables name a database."""
    pg_options: str | None = None
    """PGOPTIONS, which the driver does not read by itself."""
    ignored: tuple[str, ...] = ()
    """Those of GROUP_VARIABLES that are set."""

    def require_database(self) -> str:
        """The database's URL, password included, for the driver. Raise UsageError where none is set."""
        if self.database_url is None and not self.pg_environment:
            raise UsageError(
                "no database is set",
                f"set {PREFIX}DATABASE_URL, for example postgresql://user:password@host:5432/database,"
                " or PGHOST and the other PG* variables; `gpustackd run --embedded` brings its own database",
            )
        return self._with_options(self.database_url or SecretStr("postgresql://"))

    def require_listen_database(self) -> str:
        """The URL for LISTEN: its own one, else that of `require_database`."""
        url = self.listen_database_url
        return self._with_options(url) if url is not None else self.require_database()

    def _with_options(self, url: SecretStr) -> str:
        text = url.get_secret_value()
        if not self.pg_options or "options" in parse_qs(urlsplit(text).query):
            return text
        mark = "&" if "?" in text else "?"
        return f"{text}{mark}options={quote(self.pg_options)}"


_FROM_ENVIRONMENT = {"pg_environment", "pg_options", "ignored"}


def _variable(name: str) -> str:
    if name == "hf_endpoint":
        return "HF_ENDPOINT"
    return (CLUSTER_PREFIX if name.startswith(CLUSTER_SETTINGS) else PREFIX) + name.upper()


VARIABLES = {name: _variable(name) for name in Settings.model_fields if name not in _FROM_ENVIRONMENT}
"""Key of the file -> name of the variable, for every setting."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value with the words that tell a person where it stands."""

    value: Any
    where: str


def load(config: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read every layer and check it. `config` is the `--config` flag, else GPUSTACKD_CONFIG names the file;
    `overrides` are the flags by field name, None = not given.

    A key of the file is the variable's name, as it is or in lower case without its prefix
    (`pool_size`, `scheduler_drain_window_seconds`). Raise one UsageError that names everything wrong.
    """
    problems: list[str] = []
    given: dict[str, _Given] = {}
    ignored = [name for name in GROUP_VARIABLES if os.environ.get(name)]
    path = config or os.environ.get(CONFIG)
    if path:
        given |= _file_layer(Path(path), problems, ignored)
    given |= _environment_layer(problems)
    for name, value in (overrides or {}).items():
        if value is not None:
            given[name] = _Given(value, f"--{name.replace('_', '-')}")
            if name not in VARIABLES:
                problems.append(f"{given.pop(name).where}: unknown setting{_hint(name, VARIABLES)}")
    settings = _check(given, tuple(dict.fromkeys(ignored)), problems)
    if settings is None:
        raise UsageError("\n  ".join(("invalid settings:", *problems)))
    return settings


_LONGEST_FILE = 1_000_000


def _file_layer(path: Path, problems: list[str], ignored: list[str]) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST_FILE + 1)
        if len(raw) > _LONGEST_FILE:
            problems.append(f"{path}: is longer than {_LONGEST_FILE} bytes")
            return {}
        content = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"{path}: is not TOML: {error}")
        return {}
    by_variable = {variable: name for name, variable in VARIABLES.items()}
    given: dict[str, _Given] = {}
    for key, value in content.items():
        name = by_variable.get(key, key)
        if (variable := _variable(key.removeprefix(CLUSTER_PREFIX).lower())) in GROUP_VARIABLES:
            ignored.append(variable)
        elif name not in VARIABLES:
            problems.append(
                f"{key} in {path}: unknown setting{_hint(key, by_variable if key.isupper() else VARIABLES)}"
            )
        elif name in given:
            problems.append(f"{key} in {path}: is set twice, also as {given[name].where.split()[0]}")
        else:
            given[name] = _Given(value, f"{key} in {path}")
    return given


def _environment_layer(problems: list[str]) -> dict[str, _Given]:
    names = set(VARIABLES.values())
    unknown = sorted(
        variable
        for variable in os.environ
        if variable.startswith(PREFIX)
        and variable not in names
        and variable != CONFIG
        and not variable.startswith(TEST_PREFIXES)
    )
    problems += [f"{variable}: unknown setting{_hint(variable, names)}" for variable in unknown]
    return {
        name: _Given(os.environ[variable], variable)
        for name, variable in VARIABLES.items()
        # an empty variable is an unset one: compose files and units write NAME= for "none"
        if os.environ.get(variable)
    }


def _check(given: Mapping[str, _Given], ignored: tuple[str, ...], problems: list[str]) -> Settings | None:
    try:
        settings = Settings(
            **{name: item.value for name, item in given.items()},
            pg_environment=any(os.environ.get(name) for name in PG_VARIABLES),
            pg_options=os.environ.get("PGOPTIONS") or None,
            ignored=ignored,
        )
    except ValidationError as error:
        problems += _problems_of(error, given)
        return None
    return None if problems else settings


_SECRET_FIELDS = {n for n, f in Settings.model_fields.items() if "SecretStr" in str(f.annotation)}


def _problems_of(error: ValidationError, given: Mapping[str, _Given]) -> list[str]:
    """One line a setting: where it stands, what is wrong, and its value unless that is a secret."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0])
        shown = "" if name in _SECRET_FIELDS else f" (it is {given[name].value!r})"
        text = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
        lines.setdefault(name, f"{given[name].where}: {text}{shown}")
    return list(lines.values())


def _hint(name: str, known: Iterable[str]) -> str:
    """The nearest name, compared without prefixes, which would make all variables look alike."""
    bare = {_bare(k): k for k in known}
    near = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=0.75)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def _bare(name: str) -> str:
    return name.removeprefix(PREFIX).removeprefix(CLUSTER_PREFIX).lower()
