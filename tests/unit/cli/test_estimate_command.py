"""`gpustackd estimate` on model directories: what is counted, what is refused, in which shape."""

import json
import os
from pathlib import Path

import pytest

from gpustackd.cli.estimate import Hub, spec_of
from gpustackd.demo.models.examples import model_documents
from gpustackd.demo.models.sparse import SparseModel, write_model
from gpustackd.domain.model_spec import Source
from gpustackd.errors import UsageError
from tests.command_line import command_in_process

EXAMPLES = {d["name"]: d for d in model_documents()}


def estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    said = command_in_process(monkeypatch, capsys)("estimate", *arguments)
    return said.code, said.out, said.err


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("bge-base-en", int(437955512 * 1.2) + 512 * 2**20),  # not the same weights a second time as .bin
        ("qwen2.5-7b", int(15231271856 * 1.2) + 2 * 2**30),
        ("deepseek-r1", int(688586727753 * 1.2) + 2 * 2**30),
    ],
)
def test_the_claim_follows_the_bytes_of_the_one_format_that_is_loaded(
    name: str, claim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, SparseModel.of(EXAMPLES[name]["x-files"]))
    code, out, _ = estimate(monkeypatch, capsys, str(tmp_path), "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert {
        "source",
        "backend",
        "architecture",
        "categories",
        "weights",
        "claim",
        "parts",
        "warnings",
    } <= set(found)
    assert found["claim"] == {"vram": claim, "ram": 0}
    assert found["weights"] == EXAMPLES[name]["x-files"]["weight_bytes"]
    assert {"weights", "kv_cache", "compute", "overhead"} <= set(found["parts"])


def test_what_each_gpu_holds_is_shown_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, SparseModel.of(EXAMPLES["qwen3-8b"]["x-files"]))
    code, out, _ = estimate(monkeypatch, capsys, str(tmp_path), "--param=--tensor-parallel-size=2")
    assert code == 0
    assert "ON EACH OF 2 GPUS" in out
    assert "all GPUs together must offer 20.31 GiB" in out


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("/nowhere/at/all",), 1, "/nowhere/at/all does not exist"),
        (("nothing",), 2, "neither an existing path nor a repository"),
        (("{}", "--param=--tensor-parallel-size=x"), 2, "--tensor-parallel-size is 'x', not a whole number"),
    ],
)
def test_what_cannot_be_estimated_is_told_without_a_traceback(
    arguments: tuple[str, ...],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model(tmp_path, SparseModel.of(EXAMPLES["qwen2.5-0.5b"]["x-files"]))
    found = estimate(monkeypatch, capsys, *(a.format(tmp_path) for a in arguments))
    assert found[0] == code
    assert expected in found[2]
    assert "Traceback" not in found[2]


def test_a_path_that_is_there_is_read_and_anything_else_is_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert spec_of("owner/name", None, None, (), (), None).local_path == str(tmp_path / "owner" / "name")
    assert spec_of("./new", None, None, (), (), None).source is Source.LOCAL_PATH
    assert spec_of("owner/other", None, None, (), (), None).huggingface_repo_id == "owner/other"
    assert spec_of("owner/name", Hub.MODEL_SCOPE, None, (), (), "v1").model_scope_model_id == "owner/name"
    with pytest.raises(UsageError):
        spec_of("other", None, None, (), (), None)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # gpus, workers, booked: 0.9 of the card on each of as many as hold the claim
        ("qwen2.5-7b", ["--card=24GiB"], (1, 1, int(24 * 2**30 * 0.9))),
        ("qwen2.5-72b", ["--card=80GiB"], (4, 1, 4 * int(80 * 2**30 * 0.9))),
        ("qwen2.5-72b", ["--card=80GiB", "--param=--pp=3"], (3, 1, 3 * int(80 * 2**30 * 0.9))),
        ("deepseek-r1", ["--card=80GiB"], (16, 2, 16 * int(80 * 2**30 * 0.9))),
        ("qwen2.5-7b", ["--card=64GiB", "--backend=MindIE"], (1, 1, int(64 * 2**30 * 0.8))),
        ("qwen2.5-72b", ["--card=4GiB"], (0, 0, 0)),
    ],
)  # fmt: skip
def test_on_cards_of_one_size_it_says_how_many_and_what_is_booked(
    name: str, arguments: list[str], expected: tuple[int, int, int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_model(tmp_path, SparseModel.of(EXAMPLES[name]["x-files"]))
    code, out, _ = estimate(monkeypatch, capsys, str(tmp_path), "-o", "json", *arguments)
    card = json.loads(out)["card"]
    assert (card["gpus"], card["workers"], card["booked"]) == expected
    assert code == (0 if expected[0] else 1)
    assert ("not enough free GPU memory" in card["message"]) == (expected[0] == 0)
    code, out, _ = estimate(monkeypatch, capsys, str(tmp_path), *arguments)
    assert code == (0 if expected[0] else 1)
    assert "on cards of" in out


@pytest.mark.parametrize(("length", "tight"), [(32768, False), (131072, True)])
def test_a_booked_share_that_does_not_hold_one_sequence_is_warned_of(
    length: int, tight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    # weights 14.2 GiB, 56 KiB of cache a token: on 22.5 GiB the share of 20.25 holds the claim of 19.0
    write_model(tmp_path, SparseModel.of(EXAMPLES["qwen2.5-7b"]["x-files"]))
    flags = (f"--param=--max-model-len={length}", "--param=--max-num-seqs=1", "--param=--enforce-eager")
    card = "--card=22.5GiB"
    _, out, _ = estimate(monkeypatch, capsys, str(tmp_path), "-o", "json", card, *flags)
    found = json.loads(out)
    each = found["per_gpu"]
    assert each["kv_cache_sequence"] == 57_344 * length
    room = found["card"]["booked"] - each["weights"] - each["compute"] - each["overhead"]
    assert (each["kv_cache_sequence"] > room) == any("booked share" in w for w in found["warnings"])
    assert any("booked share" in w for w in found["warnings"]) == tight


@pytest.mark.parametrize("card", ["0", "-1", "much", "9999999999TiB", "80m", ""])
def test_a_card_that_cannot_be_is_a_usage_error(
    card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, SparseModel.of(EXAMPLES["qwen2.5-7b"]["x-files"]))
    code, out, err = estimate(monkeypatch, capsys, str(tmp_path), f"--card={card}")
    assert (code, out) == (2, "")
    assert "--card" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--param=--gpu-memory-utilization=2"], "--gpu-memory-utilization is 2"),
        (["--param=--tp=3"], "28 heads cannot be split evenly over 3 GPUs"),
        (["--backend=SGLang", "--param=--mem-fraction-static=x"], "--mem-fraction-static is 'x'"),
        (["--backend=MindIE", "--param=-tp 3"], "--tensor-parallel-size is 3, it must be a power of two"),
        (["--param=--hf-overrides=1"], "--hf-overrides is '1'"),
    ],
)
def test_flags_with_which_nothing_would_be_placed_are_told_beside_the_figures(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_model(tmp_path, SparseModel.of(EXAMPLES["qwen2.5-7b"]["x-files"]))
    code, out, _ = estimate(monkeypatch, capsys, str(tmp_path), "-o", "json", *arguments)
    found = json.loads(out)
    assert (code, found["weights"]) == (0, 15231271856)
    assert said in " ".join(found["warnings"])


def test_a_path_that_is_no_text_is_read_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    write_model(folder, SparseModel.of(EXAMPLES["qwen2.5-7b"]["x-files"]))
    code, out, _ = estimate(monkeypatch, capsys, str(folder), "-o", "json")
    assert (code, json.loads(out)["weights"]) == (0, 15231271856)
    code, out, err = estimate(monkeypatch, capsys, str(folder))
    assert (code, err) == (0, "")
    code, _, err = estimate(monkeypatch, capsys, str(folder / "absent"))
    assert code == 1
    assert "does not exist" in err
