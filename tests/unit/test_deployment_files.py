"""The files that others deploy with: what must not get lost from them."""

import configparser
import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def unit() -> dict[str, list[tuple[str, str]]]:
    """The systemd unit: a section's settings in order; the same name may come twice."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (ROOT / "deploy/systemd/gpustackd.service").read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            current.append((name, value))
    return sections


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def last_stage() -> list[tuple[str, str]]:
    steps = dockerfile()
    begin = max(number for number, (word, _) in enumerate(steps) if word == "FROM")
    return steps[begin:]


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    return loaded


def test_the_unit_waits_for_ready_and_is_watched_and_restarted() -> None:
    service = dict(unit()["Service"])
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 0
    assert service["Restart"] == "always"
    assert service["ExecStart"].endswith("gpustackd run")
    assert service["EnvironmentFile"] == "/etc/gpustackd/gpustackd.env"
    # the daemon needs 10 s to hand back its work
    assert int(service["TimeoutStopSec"]) > 10
    assert dict(unit()["Unit"])["StartLimitIntervalSec"] == "0"


def test_the_unit_gives_no_rights_away() -> None:
    service = unit()["Service"]
    for name in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert (name, "") in service
    for name in (
        "DynamicUser",
        "NoNewPrivileges",
        "PrivateDevices",
        "PrivateTmp",
        "ProtectHome",
        "ProtectKernelTunables",
        "MemoryDenyWriteExecute",
        "RestrictNamespaces",
        "LockPersonality",
    ):
        assert (name, "yes") in service, name
    assert ("ProtectSystem", "strict") in service
    assert ("SystemCallFilter", "@system-service") in service


def test_the_image_runs_as_a_numbered_user_without_build_tools() -> None:
    steps = dict(last_stage())
    uid, gid = steps["USER"].split(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert json.loads(steps["ENTRYPOINT"]) == ["gpustackd"]
    assert json.loads(steps["CMD"]) == ["run"]
    assert not [rest for word, rest in last_stage() if word == "RUN"], (
        "the final stage only takes what was built"
    )
    assert "slim" in steps["FROM"]


def test_the_image_installs_what_is_locked_and_nothing_else() -> None:
    runs = " ".join(rest for word, rest in dockerfile() if word == "RUN")
    assert "--require-hashes" in runs
    assert "requirements.lock" in runs
    assert "--no-deps --no-index" in runs


def test_the_images_health_check_is_pythons_own_and_compiles() -> None:
    check = dict(last_stage())["HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "healthcheck", "exec")
    assert "/healthz" in command[2]


def test_all_that_the_image_copies_is_let_through_to_it() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in rules
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for word, rest in dockerfile():
        if word == "COPY" and not rest.startswith("--from"):
            for source in shlex.split(rest)[:-1]:
                assert any(fnmatch.fnmatch(source, rule) for rule in allowed), source
                assert (ROOT / source).exists(), source


def test_compose_runs_three_replicas_that_may_write_nowhere(compose: dict[str, Any]) -> None:
    daemon = compose["services"]["gpustackd"]
    assert daemon["deploy"]["replicas"] == 3
    for service in (daemon, compose["services"]["migrate"]):
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
    assert "ports" not in daemon, "three replicas cannot share one port of the host"


def test_compose_migrates_before_the_replicas_start(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["postgres"]["image"] == "postgres:18"
    assert "pg_isready" in services["postgres"]["healthcheck"]["test"]
    assert services["migrate"]["command"] == ["migrate"]
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["gpustackd"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_compose_holds_no_password(compose: dict[str, Any]) -> None:
    environment = compose["services"]["gpustackd"]["environment"]
    assert environment["PGPASSWORD"].startswith("${POSTGRES_PASSWORD:?")


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_pins_every_package_by_hash_and_names_no_place(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^(\S+?)==\S+.*?(?=^\S|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) > 30
    assert "://" not in text
    assert "--index" not in text
    for block in re.split(r"\n(?=[a-z0-9])", text.partition("make lock\n")[2]):
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_the_locks_hold_every_dependency_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = list(project["project"]["dependencies"])
    developers = needed + project["dependency-groups"]["dev"]
    for extra in project["project"]["optional-dependencies"].values():
        developers += extra
    for names, file in ((needed, "requirements.lock"), (developers, "requirements-dev.lock")):
        locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / file).read_text(), flags=re.MULTILINE))
        for requirement in names:
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert name is not None
            assert name.group().lower().replace("_", "-") in locked, f"{requirement}: run `make lock`"


def test_the_editor_settings_can_be_read() -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    assert parser["*"]["max_line_length"] == "110"
