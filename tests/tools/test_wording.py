"""What the library says of its arguments, in the words of the command line."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from paceline.bundle import Bundle
from paceline.errors import InvalidInputError
from paceline_tools.wording import in_options

from .conftest import Invoke


@pytest.mark.parametrize(
    ("command", "said", "expected"),
    [
        ("build", "max_length=513 exceeds the 512 positions", "--max-length 513 exceeds the 512 positions"),
        (
            "build",
            "choose fewer drafted tokens or a larger max_length.",
            "choose fewer drafted tokens or a larger --max-length.",
        ),
        ("build", "max_draft_tokens must be at least 1, got 0.", "--max-draft-tokens must be at least 1, got 0."),
        ("build", "sms must be different compute capabilities", "--sm must be different compute capabilities"),
        ("build", "workspace must be a positive number", "--workspace must be a positive number"),
        ("build", "timing_cache='a/b' is of no use", "--timing-cache a/b is of no use"),
        ("build", "profile_rows names the model 'draft'", "--profile names the model 'draft'"),
        ("export", "draft_precision='int4' is for a draft model", "--draft-precision int4 is for a draft model"),
        ("export", "out must be the path of a folder, got ''.", "--out must be the path of a folder, got ''."),
        ("generate", "num_draft_tokens=5, but the target", "--draft-tokens 5, but the target"),
        ("generate", "stop_token_ids holds id 999", "--stop-token-id holds id 999"),
        ("generate", "threads=2 comes too late: leave threads out.", "--threads 2 comes too late: leave threads out."),
        # What is no argument stays: files, other names, words of a sentence.
        ("build", "bundles/max_length/x has no caches", "bundles/max_length/x has no caches"),
        ("build", "the file 'max_length' is missing", "the file 'max_length' is missing"),
        (
            "build",
            "A profile is for 3 rows; strict builds refuse it.",
            "A profile is for 3 rows; strict builds refuse it.",
        ),
        ("info", "max_length=513 exceeds", "max_length=513 exceeds"),
        ("export", "draft_vocab='' is empty", "--draft-vocab '' is empty"),
    ],
)
def test_arguments_become_options(command: str, said: str, expected: str) -> None:
    assert in_options(said, importlib.import_module(f"paceline_tools.{command}").command.params) == expected


def test_a_refusal_of_the_library_names_the_option(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidInputError("max_batch must be at least 1, got 0.")

    monkeypatch.setattr(Bundle, "open", refuse)
    result = invoke("build", tmp_path, "--sm", "8.9", "--max-batch", 0)
    assert (result.exit_code, result.stderr) == (2, "Error: --max-batch must be at least 1, got 0.\n")
