"""Profiles on disk: which is found, and what becomes of those that are stale or damaged."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.cost_profile import PROFILE_FORMAT, CostProfile, Setup, cpu_name, default_folder, find_costs
from paceline.costs import Costs
from paceline.errors import ProfileError

SETUP = Setup("ab" * 32, "cpu", "A processor", 2, 0, "1.30.0")
OTHERS: dict[str, Any] = {
    "bundle": "cd" * 32,
    "provider": "cuda",
    "device": "Another",
    "cores": 4,
    "threads": 1,
    "onnxruntime": "1.31.0",
}


def profile_of(setup: Setup = SETUP, **changes: Any) -> CostProfile:
    fields: dict[str, Any] = {
        "format_version": PROFILE_FORMAT,
        "setup": setup,
        "measured_at": "2026-01-01T00:00:00+00:00",
        "repeats": 3,
        "lengths": (100, 300),
        "target_pass": ((0.01, 0.012), (0.02, 0.028)),
        "target_spread": ((0.001, 0.001), (0.001, 0.001)),
        "draft_step": (0.001, 0.003),
        "draft_spread": (0.0, 0.0),
    }
    return CostProfile(**{**fields, **changes})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "profiles"


def test_a_profile_comes_back_as_it_was_written(folder: Path) -> None:
    assert default_folder() == folder
    path = folder / SETUP.file_name
    profile_of().write(path)
    assert CostProfile.read(path) == profile_of()
    assert [one.name for one in folder.iterdir()] == [SETUP.file_name]
    found = find_costs(SETUP, "auto")
    assert found is not None
    assert found.at(100) == Costs(0.001, (0.01, 0.012))
    assert found.origin == f"profile {SETUP.file_name}, measured 2026-01-01T00:00:00+00:00"
    assert find_costs(SETUP, path) == found


def test_a_write_that_fails_leaves_the_old_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / SETUP.file_name
    profile_of().write(path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        profile_of(repeats=5).write(path)
    assert CostProfile.read(path).repeats == 3
    assert len(list(folder.iterdir())) == 1


def test_without_a_profile_there_are_no_costs(caplog: pytest.LogCaptureFixture) -> None:
    assert find_costs(SETUP, "auto") is None
    assert caplog.messages == []


@pytest.mark.parametrize("field", OTHERS)
def test_a_stale_profile_is_not_used_and_it_is_said_why(
    field: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = dataclasses.replace(SETUP, **{field: OTHERS[field]})
    path = folder / other.file_name
    profile_of(other).write(path)
    assert find_costs(SETUP, "auto") is None
    if field == "bundle":  # it is about something else
        assert caplog.messages == []
    else:
        [message] = caplog.messages
        assert f"{field} {OTHERS[field]!r} where" in message
        assert "is not used" in message
    with pytest.raises(ProfileError, match=rf"another setup \({field} .* is expected\); run `paceline tune` here"):
        find_costs(SETUP, path)
    # … nor where it lies under the name of the fitting one.
    path.rename(folder / SETUP.file_name)
    caplog.clear()
    assert find_costs(SETUP, "auto") is None
    assert "It is not used." in caplog.text


def test_every_field_of_a_setup_is_tried() -> None:
    assert [field.name for field in dataclasses.fields(Setup)] == list(OTHERS)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(profile_of().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "damaged"),
        ("[" * 100_000, "damaged"),
        (profile_of().to_json()[:200], "damaged"),
        ("[]", "should be of type dict"),
        (changed(format_version=PROFILE_FORMAT + 1), f"format {PROFILE_FORMAT + 1}, this paceline reads format"),
        (changed(more=1), "does not know: more"),
        (changed(lengths=[300, 100]), "must be ascending"),
        (changed(lengths=[100]), "its times cannot be"),
        (changed(target_pass=[[0.01, -1.0], [0.02, 0.03]]), "its times must be from"),
        (changed(target_pass=[[0.01, float("nan")], [0.02, 0.03]]), "its times must be from"),
        (changed(target_pass=[[0.01, 1e308], [0.02, 0.03]]), "its times must be from"),
        (changed(draft_step=[0.1, 5e-324]), "its times must be from"),
        (changed(target_pass=[[0.01, "x"], [0.02, 0.03]]), r"target_pass\[0\]\[1\] should be of type float"),
        (changed(draft_step=[0.1]), "its times cannot be"),
        (changed(draft_step=[]), "its times cannot be"),
    ],
)
def test_a_damaged_profile_is_passed_over_or_refused(
    text: str, reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    path = folder / SETUP.file_name
    path.write_text(text)
    assert find_costs(SETUP, "auto") is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "damaged" in record.getMessage()
    assert "It is not used." in record.getMessage()
    with pytest.raises(ProfileError, match=reason):
        find_costs(SETUP, path)


def test_a_pipe_in_its_place_is_not_waited_for(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / SETUP.file_name)
    assert find_costs(SETUP, "auto") is None
    with pytest.raises(ProfileError, match="it is no file"):
        find_costs(SETUP, folder / SETUP.file_name)


def test_a_named_profile_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        find_costs(SETUP, tmp_path / "none.json")


def test_bytes_that_are_no_text_are_damage(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / SETUP.file_name).write_bytes(b"\xff\xfe")
    assert find_costs(SETUP, "auto") is None


def test_more_rows_never_cost_less() -> None:
    rows = (0.010, 0.014, 0.012, 0.013, 0.020, 0.019)
    costs = profile_of(lengths=(1,), target_pass=(rows,), target_spread=(rows,), draft_step=(0.1,)).costs()
    assert costs.at(1).target_pass == pytest.approx((0.010, 0.013, 0.013, 0.013, 0.0195, 0.0195))


def test_a_bundle_without_a_draft_has_a_profile_too() -> None:
    assert profile_of(draft_step=None, draft_spread=None).costs().at(100) == Costs(0.0, (0.01, 0.012))


@pytest.mark.parametrize(("value", "expected"), [("", "~/.cache"), ("relative/path", "~/.cache")])
def test_the_folder_is_the_users_where_the_variable_says_nothing(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_folder() == Path(expected).expanduser() / "paceline" / "profiles"


def test_a_service_without_a_home_has_no_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does where no home is known
    assert find_costs(SETUP, "auto") is None
    with pytest.raises(ProfileError, match="set XDG_CACHE_HOME"):
        default_folder()


def test_the_processor_has_a_name() -> None:
    assert cpu_name()
