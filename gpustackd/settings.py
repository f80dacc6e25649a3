"""Settings of one process: built-in < TOML file < environment < flags, checked whole before the start."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Check
from gpustackd.errors import UsageError
from gpustackd.placement.preferences import PREFERENCES
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
    TimeZone,
    Token,
    WebUrl,
)

PREFIX = "GPUSTACKD_"
KNOB_PREFIX = "GPUSTACK_"
CONFIG = "GPUSTACKD_CONFIG"
NOT_OURS = ("GPUSTACKD_TEST_", "GPUSTACKD_PEER_")
"""Variables of the test suite: neither settings nor mistakes."""

PG_VARIABLES = ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
"""Any of these says where a database is; the driver reads them, and PGPASSWORD, PGPASSFILE, PGSSL*."""


class Knobs(BaseModel):
    """Weights and windows under the names that GPUStack gives them (`GPUSTACK_` + the field's name).

    Maximum scores of 0 or less take their scorer out. Windows are seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    scheduler_scale_up_placement_max_score: Number = 100.0
    scheduler_scale_up_locality_max_score: Number = 5.0
    scheduler_pairing_affinity_max_score: Number = 200.0
    scheduler_topology_proximity_max_score: Number = 150.0
    scheduler_group_pair_locality_weight: Number = 1.0
    scheduler_group_file_locality_weight: Number = 0.3
    scheduler_group_candidate_limit: Count = 16
    scheduler_drain_window_seconds: Number = 60.0
    """0 or less deletes at once."""
    scheduler_scale_down_status_max_score: Number = 100.0
    scheduler_scale_down_offload_max_score: Number = 10.0
    scheduler_scale_down_placement_max_score: Number = 1.0
    scheduler_scale_down_pairing_max_score: Annotated[Number, Field(lt=50)] = 20.0
    """Below 50: half the status score, so that pairing never outranks a state."""
    scheduler_gather_blocked_dwell_seconds: NotNegative = 120.0
    model_instance_reschedule_grace_period: NotNegative = 300.0
    worker_heartbeat_interval: Seconds = 30.0
    worker_heartbeat_grace_period: Seconds = 150.0


class Settings(BaseSettings):
    """Every setting, once, immutable. Durations are seconds. Made by `load`, never by itself."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: DatabaseUrl | None = None
    listen_database_url: DatabaseUrl | None = None
    pool_size: Annotated[Count, Field(le=1000)] = 5
    rescan_interval: Seconds = 180.0
    concurrency: Annotated[Count, Field(le=256)] = 4
    lease: Annotated[Number, Field(ge=1, le=LONGEST)] = 30.0
    pickup_window: Seconds = 60.0
    unreachable_window: Seconds = 900.0
    """How long an instance that nobody reports is waited for on a worker that beats."""
    restart_backoff: Seconds = 10.0
    """Before the second restart of an instance that fails; later ones twice as long each, up to 30 times."""
    stable_window: Seconds = 600.0
    """Of running, after which earlier failures are history."""
    avoid_window: Seconds = 1800.0
    """For which any other place is preferred to one where an instance failed again and again."""
    drain_window: NotNegative = 0.0
    """How long a surplus replica of a model without roles drains before it is deleted; groups have a knob."""
    placement_strategy: Annotated[Strategy, Lower] = Strategy.SPREAD
    queue_order: Annotated[Literal["priority", "decreasing"], Lower] = "priority"
    """Who of those that wait is decided first: by priority and age, or within a priority the largest."""
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
    prefer: frozenset[str] = frozenset()
    """Names of `PREFERENCES` that are on."""
    knobs: Knobs = Knobs()
    pg_environment: bool = False
    """Whether PG* variables name a database."""
    pg_options: str | None = None
    """PGOPTIONS, which the driver does not read by itself."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values come in through `load` alone: it knows where each came from, and says so."""
        return (init_settings,)

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


_INNER = {"prefer", "knobs", "pg_environment", "pg_options"}
_FIELDS = {name: PREFIX + name.upper() for name in Settings.model_fields if name not in _INNER}
_FIELDS["hf_endpoint"] = "HF_ENDPOINT"
_KNOBS = {name: KNOB_PREFIX + name.upper() for name in Knobs.model_fields}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value with the words that tell a person where it stands."""

    value: Any
    where: str


def variables(preferences: Sequence[str] = PREFERENCES) -> dict[str, str]:
    """Key of the file -> name of the variable, for every setting."""
    return {**_FIELDS, **_KNOBS, **{name: PREFIX + name.upper() for name in preferences}}


def load(
    config: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    preferences: Sequence[str] = PREFERENCES,
) -> Settings:
    """Read every layer and check it. `config` is the `--config` flag, else GPUSTACKD_CONFIG names the file;
    `overrides` are the flags by field name, None = not given.

    A key of the file is the variable's name, as it is or in lower case without its prefix
    (`pool_size`, `scheduler_drain_window_seconds`). Raise one UsageError that names everything wrong.
    """
    known = variables(preferences)
    problems: list[str] = []
    given: dict[str, _Given] = {}
    path = config or os.environ.get(CONFIG)
    if path:
        given |= _file_layer(Path(path), known, problems)
    given |= _environment_layer(known, problems)
    for name, value in (overrides or {}).items():
        if value is not None:
            given[name] = _Given(value, f"--{name.replace('_', '-')}")
            if name not in known:
                problems.append(f"{given.pop(name).where}: no such setting{_hint(name, known)}")
    settings = _check(given, preferences, problems)
    if settings is None:
        raise UsageError("\n  ".join(("nothing was started, the settings are wrong:", *problems)))
    return settings


_LONGEST_FILE = 1_000_000


def _file_layer(path: Path, known: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST_FILE + 1)
        if len(raw) > _LONGEST_FILE:
            problems.append(f"{path}: is longer than the {_LONGEST_FILE} bytes that are read")
            return {}
        content = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"{path}: is not TOML: {error}")
        return {}
    by_variable = {variable: name for name, variable in known.items()}
    given: dict[str, _Given] = {}
    for key, value in content.items():
        name = by_variable.get(key, key)
        if name not in known:
            problems.append(f"{key} in {path}: no such setting{_hint(key, [*known, *by_variable])}")
        elif name in given:
            problems.append(f"{key} in {path}: is set twice, also as {given[name].where.split()[0]}")
        else:
            given[name] = _Given(value, f"{key} in {path}")
    return given


def _environment_layer(known: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    names = set(known.values())
    strange = sorted(
        variable
        for variable in os.environ
        if variable.startswith(PREFIX)
        and variable not in names
        and variable != CONFIG
        and not variable.startswith(NOT_OURS)
    )
    problems += [f"{variable}: no such setting{_hint(variable, names)}" for variable in strange]
    return {
        name: _Given(os.environ[variable], variable)
        for name, variable in known.items()
        # an empty variable is an unset one: compose files and units write NAME= for "none"
        if os.environ.get(variable)
    }


def _check(given: Mapping[str, _Given], preferences: Sequence[str], problems: list[str]) -> Settings | None:
    values = {name: item.value for name, item in given.items() if name in _FIELDS}
    knobs = {name: item.value for name, item in given.items() if name in _KNOBS}
    prefer: set[str] = set()
    for name in preferences:
        if name in given:
            switch = _SWITCH.get(str(given[name].value).strip().lower())
            if switch is None:
                problems.append(f"{given[name].where}: must be true or false")
            elif switch:
                prefer.add(name)
    checked = Knobs()
    try:
        checked = Knobs(**knobs)
    except ValidationError as error:
        problems += _told(error, given)
    try:
        settings = Settings(
            **values,
            prefer=frozenset(prefer),
            knobs=checked,
            pg_environment=any(os.environ.get(name) for name in PG_VARIABLES),
            pg_options=os.environ.get("PGOPTIONS") or None,
        )
    except ValidationError as error:
        problems += _told(error, given)
        return None
    return None if problems else settings


_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_SECRET_FIELDS = {n for n, f in Settings.model_fields.items() if "SecretStr" in str(f.annotation)}


def _told(error: ValidationError, given: Mapping[str, _Given]) -> list[str]:
    told: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0])
        shown = "" if name in _SECRET_FIELDS else f" (it is {given[name].value!r})"
        text = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
        told.setdefault(name, f"{given[name].where}: {text}{shown}")
    return list(told.values())


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""
