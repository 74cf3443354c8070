from __future__ import annotations

import io
import sys

import pytest

from paceline_tools.progress import stages
from paceline_tools.tables import duration, number, percent, size, table


def test_columns_are_aligned() -> None:
    assert table(("name", "n"), [("a", "1.5"), ("longer", "10")]) == (
        "name      n\n"
        "------  ---\n"
        "a       1.5\n"
        "longer   10"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_362_432, "98.4 MB"), (1.117e9, "1.12 GB"), (5e13, "5e+04 GB")],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4212, "0.421 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (125.3, "2 min 05 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert (number(1.234), number(1.5, 1, "×"), number(None)) == ("1.23", "1.5×", "–")
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")


def test_stages_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with stages() as on_progress:
        for stage, fraction in (("read", 0.0), ("write", 0.25), ("write", 0.5), ("done", 1.0)):
            on_progress(stage, fraction)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "  0%  read\n 25%  write\n100%  done\n"


def test_stages_are_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with stages() as on_progress:
        on_progress("read", 0.0)
        on_progress("write", 0.5)
        on_progress("write", 0.25)  # a fraction that goes back does not move the bar
        on_progress("hash", 0.5)
    drawn = terminal.getvalue()
    assert "hash" in drawn
    assert "50%" in drawn
    assert "write" in drawn
