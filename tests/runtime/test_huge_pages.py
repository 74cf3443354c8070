"""Weights in huge pages: asked for where Linux wants to be asked, and malloc's settings are put back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline import huge_pages

needs_madvise = pytest.mark.skipif(
    not huge_pages._MODE.is_file() or "[madvise]" not in huge_pages._MODE.read_text() or huge_pages._glibc() is None,
    reason="needs Linux with glibc whose huge pages are to be asked for",
)


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_madvise
@pytest.mark.parametrize("wanted", [True, False])
def test_the_heap_of_the_weights_asks_for_huge_pages(smol_bundle: Path, wanted: bool) -> None:
    program = """
        import re, sys, paceline
        decoder = paceline.load(sys.argv[1], huge_pages=sys.argv[2] == "True")
        maps = re.split(r"\\n(?=[0-9a-f]+-)", open("/proc/self/smaps").read())
        asked = [part for part in maps if re.search(r"VmFlags:.* hg", part) and "[heap]" in part]
        print(sum(int(re.search(r"Rss:\\s+(\\d+)", part)[1]) for part in asked) * 1024)
    """
    resident = int(run(program, str(smol_bundle), str(wanted)))
    weights = sum(path.stat().st_size for path in smol_bundle.glob("*/*.data"))
    assert (resident > weights / 3) == wanted  # unpacked weights are mapped from their file, which stays outside


@needs_madvise
def test_malloc_maps_large_blocks_again_and_gives_the_rest_back() -> None:
    """Behind the block, the untouched part of the heap goes, and a block of 40 MiB is a mapping of its own."""
    program = """
        import ctypes
        from paceline.huge_pages import _glibc, huge_pages
        libc = _glibc()
        before = libc.sbrk(0)
        with huge_pages(1 << 30):
            inside = libc.sbrk(0)
        libc.malloc_trim(0)
        after = libc.sbrk(0)
        block = libc.malloc(40 << 20)
        print(inside - before > 1000 << 20, after - before < 64 << 20, libc.sbrk(0) == after or block > after)
    """
    assert run(program).split() == ["True", "True", "True"]


@pytest.mark.parametrize("mode", ["always madvise [never]", "[always] madvise never", None])
def test_elsewhere_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    path = tmp_path / "enabled"
    if mode:
        path.write_text(mode)
    monkeypatch.setattr(huge_pages, "_MODE", path)
    assert huge_pages._glibc() is None
    with huge_pages.huge_pages(1 << 30):
        pass


def test_more_than_there_is_does_no_harm() -> None:
    program = """
        from paceline.huge_pages import huge_pages
        with huge_pages(1 << 50):
            held = bytearray(100 << 20)
        print(len(held) >> 20)
    """
    assert run(program).strip() == "100"
