"""The page of `paceline bench --html` in a real browser: Chromium by Playwright, and axe's rules of accessibility."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline_tools.benchmark.figures import summarise
from paceline_tools.benchmark.page import page

from .bench_documents import made_up

FOLDER = Path(__file__).parent / "browser"


@pytest.mark.slow
def test_the_page_is_readable_by_everyone_and_asks_for_nothing(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or shutil.which("npm") is None:
        pytest.skip("a browser and npm are needed: apt-get install chromium npm")
    for name in ("package.json", "look.mjs"):
        shutil.copy(FOLDER / name, tmp_path)
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=300)
    document = made_up(1, temperatures=(0.0, 0.8))
    file = tmp_path / "run.html"
    file.write_text(page(document, summarise(document)), encoding="utf-8")
    done = subprocess.run(
        ["node", "look.mjs", file, chromium], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300
    )
    views = [json.loads(line) for line in done.stdout.splitlines()]
    assert [view["name"] for view in views] == ["light", "dark", "phone", "phone-dark"]
    for view in views:
        assert view["requests"] == [file.as_uri()]
        assert view["errors"] == []
        assert view["overflow"] == 0
        assert view["passes"] > 10  # axe did look
        assert [one for one in view["violations"] if one["impact"] in ("serious", "critical")] == []
        assert (tmp_path / f"{view['name']}.png").stat().st_size > 10_000
