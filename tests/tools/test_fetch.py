"""`paceline fetch`: what it hands on, and what it prints. The fetching itself is tested in tests/export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_export.recipe import recipe_names

from .conftest import Invoke


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Replaces the fetching; collects its arguments."""
    made: list[tuple[str, dict[str, Any]]] = []

    def fetch_all(name: str, **options: Any) -> dict[str, Path]:
        made.append((name, options))
        options["progress"]("download", 1, 2)
        return {"a": Path("/cache/a"), "b": Path("/cache/b")}

    monkeypatch.setattr("paceline_tools.fetch.fetch_all", fetch_all)
    return made


def test_it_prints_where_the_checkpoints_lie(invoke: Invoke, calls: list[tuple[str, dict[str, Any]]]) -> None:
    result = invoke("fetch", "some-pair", "--route", "pypi", "--cache-dir", "/cache", "--verify")
    assert result.exit_code == 0
    assert result.stdout == "/cache/a\n/cache/b\n"
    ((name, options),) = calls
    del options["progress"]
    assert (name, options) == ("some-pair", {"cache_dir": Path("/cache"), "route": "pypi", "verify": True})


def test_what_it_does_unless_told(invoke: Invoke, calls: list[tuple[str, dict[str, Any]]]) -> None:
    invoke("fetch", "one")
    ((_, options),) = calls
    del options["progress"]
    assert options == {"cache_dir": None, "route": "auto", "verify": False}


def test_the_list_names_every_recipe(invoke: Invoke) -> None:
    result = invoke("fetch", "--list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if line in recipe_names()] == list(recipe_names())
    assert "  target qwen2.5-coder-1.5b, draft qwen2.5-coder-0.5b" in lines
    assert "  licence: Apache-2.0" in lines
    assert "  routes: hub HuggingFaceTB/SmolLM2-135M-Instruct, pypi 92.9 MB" in lines


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "NAME is missing. Recipes: "),
        (["--list", "smollm2-135m"], 2, "--list takes no NAME"),
        (["smollm2-135m", "--route", "ftp"], 2, "'ftp' is not one of"),
        ([""], 2, "got ''; the name or path of a source is expected"),
        (["smollm2-135m", "--cache-dir", ""], 2, "got an empty text where a path is expected"),
        (["--list", "--cache-dir", ""], 2, "got an empty text where a path is expected"),
        (["/etc/passwd"], 1, "There is no file or folder '/etc/passwd'"),
        (["smollm2"], 1, "Did you mean 'smollm2-135m'?"),
        (["missing.toml"], 1, "There is no recipe at missing.toml"),
    ],
)
def test_what_cannot_be_fetched(invoke: Invoke, args: list[str], code: int, message: str) -> None:
    result = invoke("fetch", *args)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
