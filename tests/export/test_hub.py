"""The hub's route, through the real huggingface_hub, against a small hub on 127.0.0.1."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save

from paceline.errors import CheckpointError, FetchError
from paceline_export.fetch import fetch
from paceline_export.source import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = save({"w": np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)})
GOOD = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "README.md": b"not wanted",
    "modeling_evil.py": b"not wanted",
    "pytorch_model.bin": b"not wanted",
    "onnx/config.json": b"not wanted",
    "consolidated.safetensors": b"not wanted",
}


class Hub:
    """A hub with one repository, `org/model`; `got` lists the paths asked for."""

    def __init__(self) -> None:
        self.files = dict(GOOD)
        self.gated = False
        self.got: list[str] = []

    def entries(self, name_key: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for name, content in self.files.items():
            entry: dict[str, object] = {name_key: name, "size": len(content), "type": "file", "oid": "0" * 40}
            if name.endswith((".safetensors", ".bin")):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return entries


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.got.append(f"{self.command} {path}")
            if not path.startswith(("/api/models/org/model", "/org/model/")):
                self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif hub.gated:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif "/revision/none" in path:
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif "/tree/" in path:
                self.answer(200, json.dumps(hub.entries("path")).encode())
            elif path.startswith("/api/"):
                info = {"id": "org/model", "sha": COMMIT, "siblings": hub.entries("rfilename")}
                self.answer(200, json.dumps(info).encode())
            else:
                content = hub.files[path.partition(f"/resolve/{COMMIT}/")[2]]
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": etag})

        do_HEAD = do_GET  # noqa: N815 -- the name is http.server's

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    # what HF_ENDPOINT sets, once, when huggingface_hub is imported
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    yield hub
    server.shutdown()
    server.server_close()


def test_only_what_an_export_reads_is_downloaded_and_then_nothing(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = fetch("org/model", cache_dir=tmp_path, progress=lambda *args: seen.append(args))
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    size = sum(len(hub.files[path.name]) for path in folder.iterdir())
    assert seen[-1] == ("download", size, size)
    hub.got.clear()
    source = resolve("org/model", cache_dir=tmp_path)
    assert (source.name, source.kind, source.folder) == ("org/model", "hub", folder)
    assert source.sha256() == hashlib.sha256(WEIGHTS).hexdigest()
    assert fetch("org/model", cache_dir=tmp_path, verify=True) == folder
    assert hub.got == []


def test_a_rerun_after_an_interruption_fetches_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/model", cache_dir=tmp_path)
    (folder / "tokenizer.json").resolve().unlink()
    (folder / "tokenizer.json").unlink()
    hub.got.clear()
    assert fetch("org/model", cache_dir=tmp_path) == folder
    assert [line for line in hub.got if line.startswith("GET /org/")] == [
        f"GET /org/model/resolve/{COMMIT}/tokenizer.json"
    ]


def test_verify_finds_a_changed_file(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/model", cache_dir=tmp_path)
    changed = bytearray(WEIGHTS)
    changed[-1] ^= 1
    (folder / "model.safetensors").write_bytes(changed)
    with pytest.raises(FetchError, match=r"model.safetensors has SHA-256 .* the hub's file has .*delete"):
        fetch("org/model", cache_dir=tmp_path, verify=True)


def test_a_repository_of_pickles_is_refused_before_anything_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"The hub's org/model has its weights only as pickles"):
        fetch("org/model", cache_dir=tmp_path)
    del hub.files["pytorch_model.bin"]
    hub.files["model-q4.gguf"] = b""
    with pytest.raises(CheckpointError, match=r"no model.safetensors but GGUF files \(model-q4.gguf\)"):
        fetch("org/model", cache_dir=tmp_path)
    assert not any(line.split()[1].startswith("/org/") for line in hub.got)


def test_what_cannot_be_read_is_told_with_the_mend(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no repository 'org/other', or it is private.*hf auth login"):
        fetch("org/other", cache_dir=tmp_path)
    with pytest.raises(FetchError, match="org/model has no revision 'none'"):
        fetch("org/model@none", cache_dir=tmp_path)
    hub.gated = True
    with pytest.raises(FetchError, match="org/model is gated: accept its terms"):
        fetch("org/model", cache_dir=tmp_path)


def test_a_full_disk_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("paceline_export.fetch.snapshot_on_disk", lambda _: None)
    with pytest.raises(FetchError, match=r"disk of the hub's cache became full .*HF_HOME"):
        fetch("org/model", cache_dir=tmp_path)


def test_a_name_that_is_looked_up_for_ever_is_given_up(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getaddrinfo obeys no timeout of a socket."""
    done = threading.Event()

    def hang(*_: object, **__: object) -> None:
        done.wait(60)
        raise OSError("no such name")

    monkeypatch.setattr("socket.getaddrinfo", hang)
    monkeypatch.setattr("paceline_export.hub._PROBE_DEADLINE", 0.5)
    started = time.perf_counter()
    try:
        with pytest.raises(FetchError, match=r"does not answer for org/model .*no answer within 0.5 s"):
            fetch("org/model", cache_dir=tmp_path)
        assert time.perf_counter() - started < 10
    finally:
        done.set()


def test_offline_mode_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=r"cannot be used for org/model: .*offline"):
        fetch("org/model", cache_dir=tmp_path)
    assert hub.got == []


def test_a_recipe_takes_the_hub_where_it_answers(hub: Hub, tmp_path: Path) -> None:
    recipe = tmp_path / "some.toml"
    recipe.write_text('description = "x"\nlicence = "y"\n[hub]\nid = "org/model"\n')
    source = resolve(str(recipe), cache_dir=tmp_path)
    assert (source.name, source.kind) == ("some", "recipe")
    assert (source.folder / "model.safetensors").read_bytes() == WEIGHTS
