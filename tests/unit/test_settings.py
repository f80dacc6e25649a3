"""Settings: the order of their layers, and that every mistake stops the start and is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Check
from gpustackd.errors import UsageError
from gpustackd.setting_types import Address
from gpustackd.settings import GROUP_VARIABLES, VARIABLES, Settings, load


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GPUSTACK", "PG")) or name == "HF_ENDPOINT":
            monkeypatch.delenv(name)


def mistake(**arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(**arguments)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    path = folder / "gpustackd.toml"
    path.write_text(text, "utf-8")
    return path


def test_the_built_in_values_are_those_of_the_contract() -> None:
    settings = load()
    assert (settings.pool_size, settings.concurrency) == (5, 4)
    assert (settings.rescan_interval, settings.lease, settings.pickup_window) == (180, 30, 60)
    assert settings.placement_strategy is Strategy.SPREAD
    assert settings.commit_check is Check.FITS
    assert settings.foreign_memory == "ignore"
    assert settings.http == Address("127.0.0.1", 9480)
    assert (settings.log_level, settings.log_format) == ("info", "auto")
    assert settings.timezone is None
    assert not settings.prefer_mean_over_gpus


@pytest.mark.parametrize("name", ["LEASE", "RESCAN_INTERVAL", "PICKUP_WINDOW"])
def test_a_time_that_no_clock_can_add_up_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"GPUSTACKD_{name}", "1e12")
    assert f"GPUSTACKD_{name}: should be less than or equal to" in mistake()


@pytest.mark.parametrize("token", ["two\nlines", "snow\N{SNOWMAN}", "two words"])
def test_a_token_that_no_header_takes_is_refused_and_not_shown(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTACKD_WORKER_TOKEN", token)
    said = mistake()
    assert "GPUSTACKD_WORKER_TOKEN: must be printable ASCII" in said
    assert token not in said


def test_the_line_break_at_the_end_of_a_token_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_WORKER_TOKEN", "word\n")
    token = load().worker_token
    assert token is not None
    assert token.get_secret_value() == "word"


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "#" * 1_000_001])
def test_a_file_that_is_too_deep_or_too_long_is_a_mistake(text: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    assert f"{path}: is " in mistake(config=path)


def test_every_name_of_the_contract_is_a_setting() -> None:
    names = set(VARIABLES.values())
    assert names >= {
        "GPUSTACKD_DATABASE_URL",
        "GPUSTACKD_LISTEN_DATABASE_URL",
        "GPUSTACKD_POOL_SIZE",
        "GPUSTACKD_RESCAN_INTERVAL",
        "GPUSTACKD_CONCURRENCY",
        "GPUSTACKD_LEASE",
        "GPUSTACKD_PICKUP_WINDOW",
        "GPUSTACKD_PLACEMENT_STRATEGY",
        "GPUSTACKD_COMMIT_CHECK",
        "GPUSTACKD_FOREIGN_MEMORY",
        "GPUSTACKD_HTTP",
        "GPUSTACKD_LOG_LEVEL",
        "GPUSTACKD_LOG_FORMAT",
        "GPUSTACKD_HUGGINGFACE_TOKEN",
        "HF_ENDPOINT",
        "GPUSTACKD_MODELSCOPE_ENDPOINT",
        "GPUSTACKD_WORKER_TOKEN",
        "GPUSTACKD_TIMEZONE",
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUSTACK_SCHEDULER_SCALE_UP_PLACEMENT_MAX_SCORE", 100),
        ("GPUSTACK_SCHEDULER_SCALE_UP_LOCALITY_MAX_SCORE", 5),
        ("GPUSTACK_SCHEDULER_DRAIN_WINDOW_SECONDS", 60),
        ("GPUSTACK_SCHEDULER_SCALE_DOWN_STATUS_MAX_SCORE", 100),
        ("GPUSTACK_SCHEDULER_SCALE_DOWN_OFFLOAD_MAX_SCORE", 10),
        ("GPUSTACK_SCHEDULER_SCALE_DOWN_PLACEMENT_MAX_SCORE", 1),
        ("GPUSTACK_SCHEDULER_SCALE_DOWN_PAIRING_MAX_SCORE", 20),
        ("GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD", 300),
        ("GPUSTACK_WORKER_HEARTBEAT_INTERVAL", 30),
        ("GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD", 150),
    ],
)
def test_settings_of_gpustack_clusters_keep_the_names_and_values_operators_know(
    variable: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = variable.removeprefix("GPUSTACK_").lower()
    assert getattr(load(), field) == value
    monkeypatch.setenv(variable, "7")
    assert getattr(load(), field) == 7


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, "pool_size = 7\nlease = 10\nconcurrency = 2\n")
    monkeypatch.setenv("GPUSTACKD_LEASE", "20")
    monkeypatch.setenv("GPUSTACKD_CONCURRENCY", "3")
    settings = load(path, {"concurrency": 9, "log_level": None})
    assert (settings.pool_size, settings.lease, settings.concurrency, settings.log_level) == (
        7,
        20,
        9,
        "info",
    )


def test_the_file_may_be_named_by_a_variable_and_the_flag_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.toml").write_text("pool_size = 3\n", "utf-8")
    monkeypatch.setenv("GPUSTACKD_CONFIG", str(toml(tmp_path, "pool_size = 7\n")))
    assert load().pool_size == 7
    assert load(tmp_path / "other.toml").pool_size == 3


def test_the_file_takes_short_names_and_whole_names_of_variables(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        'GPUSTACKD_POOL_SIZE = 8\nscheduler_drain_window_seconds = 0\nhf_endpoint = "http://hub:8080/"\n'
        "GPUSTACK_WORKER_HEARTBEAT_INTERVAL = 5\n",
    )
    settings = load(path)
    assert settings.pool_size == 8
    assert settings.scheduler_drain_window_seconds == 0
    assert settings.worker_heartbeat_interval == 5
    assert settings.hf_endpoint == "http://hub:8080"


def test_a_key_given_under_both_its_names_is_a_mistake(tmp_path: Path) -> None:
    assert "set twice" in mistake(config=toml(tmp_path, "pool_size = 7\nGPUSTACKD_POOL_SIZE = 8\n"))


def test_all_mistakes_are_named_at_once_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, 'pol_size = 7\nlease = "soon"\n')
    monkeypatch.setenv("GPUSTACKD_RESCAN_INTERVALL", "9")
    monkeypatch.setenv("GPUSTACKD_CONCURRENCY", "-1")
    monkeypatch.setenv("GPUSTACK_SCHEDULER_DRAIN_WINDOW_SECONDS", "many")
    said = mistake(config=path, overrides={"placement_strategy": "random"})
    assert f"pol_size in {path}: unknown setting; did you mean pool_size?" in said
    assert f"lease in {path}" in said
    assert "'soon'" in said
    assert "GPUSTACKD_RESCAN_INTERVALL: unknown setting; did you mean GPUSTACKD_RESCAN_INTERVAL?" in said
    assert "GPUSTACKD_CONCURRENCY: " in said
    assert "GPUSTACK_SCHEDULER_DRAIN_WINDOW_SECONDS: " in said
    assert "--placement-strategy: " in said
    assert "'binpack'" in said


def test_no_name_is_suggested_where_only_the_prefix_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_FOO", "1")
    assert mistake().endswith("GPUSTACKD_FOO: unknown setting")


def test_variables_of_tests_and_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "GPUSTACKD_TEST_DATABASE_URL",
        "GPUSTACKD_PEER_CASES",
        "GPUSTACK_DB_POOL_SIZE",
        "GPUSTACK_TOKEN",
    ):
        monkeypatch.setenv(name, "x")
    assert load() == load()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUSTACKD_RESCAN_INTERVAL", "0"),
        ("GPUSTACKD_RESCAN_INTERVAL", "inf"),
        ("GPUSTACKD_LEASE", "nan"),
        ("GPUSTACKD_LEASE", "0.5"),
        ("GPUSTACKD_POOL_SIZE", "0"),
        ("GPUSTACKD_POOL_SIZE", "2.5"),
        ("GPUSTACKD_HTTP", "9480"),
        ("GPUSTACKD_HTTP", "localhost:http"),
        ("GPUSTACKD_HTTP", "localhost:70000"),
        ("GPUSTACKD_HTTP", "http://localhost:9480"),
        ("GPUSTACKD_LOG_LEVEL", "loud"),
        ("GPUSTACKD_LOG_FORMAT", "xml"),
        ("GPUSTACKD_COMMIT_CHECK", "never"),
        ("GPUSTACKD_FOREIGN_MEMORY", "maybe"),
        ("GPUSTACKD_TIMEZONE", "Mars/Olympus"),
        ("GPUSTACKD_TIMEZONE", "../etc/passwd"),
        ("HF_ENDPOINT", "hub"),
        ("GPUSTACK_WORKER_HEARTBEAT_INTERVAL", "0"),
        ("GPUSTACK_SCHEDULER_SCALE_DOWN_PAIRING_MAX_SCORE", "50"),
        ("GPUSTACK_SCHEDULER_SCALE_UP_PLACEMENT_MAX_SCORE", "nan"),
    ],
)
def test_a_bad_value_is_refused_and_shown(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    said = mistake()
    assert f"{variable}: " in said
    assert repr(value) in said


def test_a_switch_is_no_number(tmp_path: Path) -> None:
    assert "must be a number" in mistake(config=toml(tmp_path, "pool_size = true\n"))


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_TIMEZONE", "")
    monkeypatch.setenv("GPUSTACKD_POOL_SIZE", "")
    assert load() == Settings()


def test_words_may_be_written_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("GPUSTACKD_PLACEMENT_STRATEGY", "BinPack")
    assert (load().log_level, load().placement_strategy) == ("warning", Strategy.BINPACK)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        (":9480", Address("0.0.0.0", 9480)),
        ("[::1]:0", Address("::1", 0)),
        ("localhost:9480", Address("localhost", 9480)),
        ("off", None),
    ],
)
def test_the_http_address_takes_hosts_and_ports(
    text: str, address: Address | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTACKD_HTTP", text)
    assert load().http == address


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.toml") in mistake(config=tmp_path / "none.toml")
    assert "is not TOML" in mistake(config=toml(tmp_path, "pool_size: 3"))
    (tmp_path / "gpustackd.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in mistake(config=tmp_path / "gpustackd.toml")


def test_preferences_are_switches_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTACKD_PREFER_MEAN_OVER_GPUS", "Yes")
    path = toml(tmp_path, "prefer_draft_weights = true\nprefer_dominant_resource = false\n")
    settings = load(path)
    assert (settings.prefer_mean_over_gpus, settings.prefer_draft_weights) == (True, True)
    assert not settings.prefer_dominant_resource
    monkeypatch.setenv("GPUSTACKD_PREFER_MEAN_OVER_GPUS", "perhaps")
    monkeypatch.setenv("GPUSTACKD_PREFER_DRAFT_WEIGHT", "1")
    said = mistake(config=path)
    assert "GPUSTACKD_PREFER_MEAN_OVER_GPUS: must be true or false" in said
    assert "did you mean GPUSTACKD_PREFER_DRAFT_WEIGHTS?" in said


def test_settings_of_groups_have_no_effect_and_those_that_are_set_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().ignored == ()
    for variable in GROUP_VARIABLES[:2]:
        monkeypatch.setenv(variable, "not even a number")
    path = toml(tmp_path, f"scheduler_group_candidate_limit = 8\n{GROUP_VARIABLES[0]} = 1\n")
    assert set(load(path).ignored) == {*GROUP_VARIABLES[:2], "GPUSTACK_SCHEDULER_GROUP_CANDIDATE_LIMIT"}


def test_no_database_is_said_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="GPUSTACKD_DATABASE_URL"):
        load().require_database()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_the_usual_schemes_of_a_database_url_are_taken(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", f"{scheme}://u:p%40@h1:5432,h2/db?sslmode=require")
    settings = load()
    assert settings.require_database() == "postgresql://u:p%40@h1:5432,h2/db?sslmode=require"
    assert settings.require_listen_database() == settings.require_database()


def test_the_connection_for_listen_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", "postgresql://pooler:6432/db")
    monkeypatch.setenv("GPUSTACKD_LISTEN_DATABASE_URL", "postgresql://direct/db")
    assert load().require_listen_database() == "postgresql://direct/db"


def test_pg_variables_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "/run/postgresql")
    assert load().require_database() == "postgresql://"


def test_pg_options_reach_the_driver_unless_the_url_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c search_path=ai")
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", "postgresql://h/db")
    assert load().require_database() == "postgresql://h/db?options=-c%20search_path%3Dai"
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", "postgresql://h/db?options=-csearch_path%3Dx")
    assert load().require_database() == "postgresql://h/db?options=-csearch_path%3Dx"


@pytest.mark.parametrize(
    "url",
    [
        "host=db user=hunter2",
        "mysql://u:hunter2@h/db",
        "postgresql://u:hunter2/x@h/db",
        "postgresql://h:0/hunter2",
    ],
)
def test_a_bad_database_url_is_refused_without_showing_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", url)
    said = mistake()
    assert "GPUSTACKD_DATABASE_URL: " in said
    assert "hunter2" not in said


def test_secrets_never_show_in_the_text_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", "postgresql://u:hunter2@h/db")
    monkeypatch.setenv("GPUSTACKD_HUGGINGFACE_TOKEN", "hf_hunter2")
    monkeypatch.setenv("GPUSTACKD_WORKER_TOKEN", "hunter2")
    settings = load()
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


def test_a_secret_of_a_wrong_type_is_not_shown(tmp_path: Path) -> None:
    said = mistake(config=toml(tmp_path, "worker_token = 271828\n"))
    assert "worker_token in" in said
    assert "271828" not in said


def test_settings_cannot_be_changed_once_built() -> None:
    with pytest.raises(ValueError):
        load().pool_size = 1  # type: ignore[misc]
