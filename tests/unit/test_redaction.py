"""Secrets stay out of text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpustackd.redaction import is_secret_name, mask_text, mask_url


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("postgresql://u:hunter2@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("postgresql://h1:5432,h2:5433/db?x=a@b", "postgresql://h1:5432,h2:5433/db?x=a@b"),
        ("postgresql://[::1]:5432/db?x=a@b", "postgresql://[::1]:5432/db?x=a@b"),
        ("postgresql://u:hun@ter2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hun/ter2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hun?ter2@h/db", "postgresql://u:***@h/db"),
        (
            "postgresql:///db?password=hunter2&sslmode=require",
            "postgresql:///db?password=***&sslmode=require",
        ),
        ("https://hub/api?access_token=hunter2#x", "https://hub/api?access_token=***#x"),
        ("no url at all", "no url at all"),
    ],
)
def test_a_url_loses_its_password_and_nothing_else(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@given(st.from_regex(r"[^@]{0,20}", fullmatch=True))
@example("a/b?c#d:e")
def test_no_password_survives_whatever_its_characters(middle: str) -> None:
    assert "hunter2" not in mask_url(f"postgresql://u:hunter2{middle}hunter2@h/db")


def test_secrets_inside_longer_text_are_masked() -> None:
    text = mask_text(
        "cannot reach postgres://u:hunter2@db/x, sent Authorization: Bearer abcdefghijkl,"
        " token hf_abcdefghijklmnopqrst"
    )
    assert text == "cannot reach postgres://u:***@db/x, sent Authorization: Bearer ***, token hf_***"


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "worker_token",
        "huggingface-token",
        "PGPASSWORD",
        "passwd",
        "Authorization",
        "api_key",
        "client_secret",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokens_per_second", "tokenizer", "max_tokens", "reason", "key", "model", "author"]
)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)
