"""The commands that read or check, as processes see them: output, exit codes, words on stderr."""

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from gpustackd.store.postgres.connect import connected
from tests.command_line import Command, command_in_process

FLEET = """
kind: Cluster
name: lab
---
kind: Worker
name: w1
cluster: lab
state: READY
ram_total: 64GiB
gpus: [{type: cuda, index: 0, vram_total: 24GiB, name: L4}, {type: cuda, index: 1}]
---
kind: Worker
name: w2
---
kind: Model
name: m
source: local_path
local_path: /models/m
---
kind: ModelInstance
name: i1
model: m
state: RUNNING
worker: w1
gpu_type: cuda
gpu_indexes: [0]
computed_resource_claim: {vram: {0: 20GiB}}
---
kind: ModelInstance
name: i2
model: m
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process, with nothing set."""
    return command_in_process(monkeypatch, capsys)


@pytest.fixture
def gpustackd(bare: Command, database: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same, with a database of its own at the right revision."""
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", database)
    return bare


@pytest.fixture
def stocked(gpustackd: Command, tmp_path: Path) -> Command:
    """The same, with a small fleet in it."""
    (tmp_path / "fleet.yaml").write_text(FLEET)
    done = gpustackd("apply", "-f", str(tmp_path / "fleet.yaml"), "-o", "json")
    assert done.code == 0, done.err
    assert [a["action"] for a in json.loads(done.out)["applied"]] == [*["created"] * 4, "adopted", "created"]
    return gpustackd


@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("clusters", "lab", "id name workers ready gpus models"),
        ("workers", "w1", "state labels ram_total ram_allocated vram_total vram_allocated gpus"),
        ("gpus", "w1:cuda:0", "worker type index vram_total vram_allocated capacity instances"),
        ("models", "m", "source location replicas categories instances"),
        ("instances", "i1", "model state worker gpu_type gpu_indexes vram ram reasons"),
    ],
)
def test_json_is_a_list_of_objects_with_stable_keys(
    stocked: Command, kind: str, name: str, keys: str
) -> None:
    (row,) = json.loads(stocked("get", kind, name, "-o", "json").out)
    assert set(keys.split()) <= set(row)
    assert stocked("get", kind, "-o", "wide").code == 0


def test_sizes_in_json_are_bytes_and_holders_are_named(stocked: Command) -> None:
    (row,) = json.loads(stocked("get", "gpus", "w1:cuda:0", "-o", "json").out)
    assert (row["vram_total"], row["vram_allocated"]) == (24 * 2**30, 20 * 2**30)
    assert row["instances"] == [
        {"name": "i1", "model": "m", "state": "RUNNING", "part": "main", "vram": 20 * 2**30}
    ]
    assert [g["index"] for g in json.loads(stocked("get", "gpus", "w1", "-o", "json").out)] == [0, 1]
    (model,) = json.loads(stocked("get", "models", "-o", "json").out)
    assert model["instances"] == {"RUNNING": 1, "PENDING": 1}


def test_a_table_names_place_and_state(stocked: Command) -> None:
    out = stocked("get", "instances").out
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [
        ["i1", "m", "RUNNING", "w1", "cuda:0"],
        ["i2", "m", "PENDING", "-"],
    ]
    assert " 20/24.0 GiB " in stocked("get", "gpus").out


def test_a_name_that_nothing_has_is_told_with_exit_code_1(stocked: Command) -> None:
    answer = stocked("get", "workers", "nobody")
    assert (answer.code, answer.out) == (1, "")
    assert "there is no worker nobody" in answer.err
    assert "next: `gpustackd get workers` lists them" in answer.err


def test_explain_tells_who_booked_it_and_who_waits(stocked: Command) -> None:
    answer = json.loads(stocked("explain", "i1", "-o", "json").out)
    assert answer["placement"]["place"] == "w1 cuda:0"
    assert answer["placement"]["decided_by"] == "apply"
    assert "model m could not be read" in stocked("explain", "i2").out
    assert stocked("explain", "i3").code == 1


def test_audit_is_clean_and_finds_a_breach_with_exit_code_1(stocked: Command, database: str) -> None:
    answer = stocked("audit", "-o", "json")
    assert (answer.code, json.loads(answer.out)["clean"]) == (0, True)

    async def spoil() -> None:
        async with connected(database, "test") as connection:
            await connection.execute("UPDATE gpu_devices SET vram_allocated = 1 WHERE index = 0")

    anyio.run(spoil)
    answer = stocked("audit", "-o", "json")
    assert answer.code == 1
    assert json.loads(answer.out)["breaches"] == [
        {"rule": 3, "what": "gpu w1:cuda:0", "how": f"allocated 1, claims {20 * 2**30}"}
    ]
    assert "broken once" in stocked("audit").out


def test_a_refused_file_leaves_the_others_applied(gpustackd: Command, tmp_path: Path) -> None:
    for name, text in (
        ("a", "kind: Cluster\nname: a"),
        ("b", "kind: Nothing"),
        ("c", "kind: Cluster\nname: c"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    answer = gpustackd("apply", *(f"-f{tmp_path / name}.yaml" for name in "abc"), "-o", "json")
    assert answer.code == 1
    assert [a["name"] for a in json.loads(answer.out)["applied"]] == ["a", "c"]
    assert "b.yaml, document 1: kind 'Nothing' is not known" in answer.err


def test_standard_input_is_a_file_too(
    gpustackd: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.write_text("kind: Cluster\nname: a")
    with path.open() as text:
        monkeypatch.setattr(sys, "stdin", text)
        assert "created" in gpustackd("apply", "-f", "-").out


def test_check_says_of_each_whether_it_is_in_order(gpustackd: Command) -> None:
    answer = gpustackd("check", "-o", "json")
    found = json.loads(answer.out)
    assert (answer.code, found["ok"]) == (0, True)
    names = [c["name"] for c in found["checks"]]
    assert names == ["settings", "database", "writable", "schema", "notifications"]


def test_a_database_without_a_schema_has_exit_code_3(
    bare: Command, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTACKD_DATABASE_URL", empty_database)
    answer = bare("get", "workers")
    assert answer.code == 3
    assert "the database has no gpustackd schema" in answer.err
    assert "next: run `gpustackd migrate`" in answer.err
    answer = bare("check")
    assert answer.code == 3
    assert "FAIL schema" in answer.out
    assert bare("migrate").out.startswith("migrated the schema from nothing to ")
    assert "already" in bare("migrate").out
    assert bare("check").code == 0


def test_a_schema_from_the_future_is_told_so_and_nothing_is_written(
    gpustackd: Command, database: str, tmp_path: Path
) -> None:
    async def ahead() -> None:
        async with connected(database, "test") as connection:
            await connection.execute("UPDATE alembic_version SET version_num = '9999'")

    anyio.run(ahead)
    (tmp_path / "a.yaml").write_text("kind: Cluster\nname: a")
    answer = gpustackd("apply", "-f", str(tmp_path / "a.yaml"))
    assert answer.code == 3
    assert "schema is newer (9999) than this build" in answer.err


def test_a_database_that_is_not_there_has_exit_code_3_and_hides_the_password(bare: Command) -> None:
    answer = bare("get", "workers", "--database-url", "postgresql://u:geheim@127.0.0.1:9/x")
    assert answer.code == 3
    assert "database not reachable at postgresql://u:***@127.0.0.1:9/x" in answer.err
    assert "geheim" not in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("get", "things"), "'things' is not one of"),
        (("get",), "Missing argument"),
        (("get", "workers"), "no database is set"),
        (
            ("apply", "-f", "/nowhere.yaml", "--database-url", "postgresql://x/y"),
            "/nowhere.yaml cannot be read",
        ),
        (("run", "data"), "a directory goes with --embedded"),
        (("run", "--embedded", "--database-url", "postgresql://x/y"), "two databases"),
        (("estimate", "nothing"), "neither an existing path nor a repository"),
        (("get", "workers", "--config", "/nowhere.toml"), "/nowhere.toml"),
    ],
)
def test_wrong_usage_has_exit_code_2_and_says_what_is_wrong(
    bare: Command, arguments: tuple[str, ...], expected: str
) -> None:
    answer = bare(*arguments)
    assert answer.code == 2
    assert expected in answer.err
    assert "Traceback" not in answer.err


def test_what_nobody_expected_is_told_in_a_sentence_and_kept_in_a_file(
    bare: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("gpustackd.cli.migrate.database", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = bare("migrate")
    assert answer.code == 1
    assert "unexpected error: RuntimeError: boom" in answer.err
    assert "Traceback" not in answer.err
    (kept,) = tmp_path.glob("gpustackd-error-*.txt")
    assert str(kept) in answer.err
    assert "Traceback" in kept.read_text()
    assert "Traceback" in bare("--debug", "migrate").err


def test_every_command_has_a_help_text_with_an_example(bare: Command) -> None:
    listed = bare("--help").out
    for command in (
        "run",
        "migrate",
        "check",
        "apply",
        "get",
        "explain",
        "estimate",
        "audit",
        "worker",
        "demo",
    ):
        assert f"\n  {command} " in listed
        assert f"Example: gpustackd {command}" in bare(command, "--help").out


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpustackd", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpustackd ")
