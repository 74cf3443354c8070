"""What comes before and after a build, without TensorRT: targets, profiles, and engines on disk."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.bundle import Bundle, EngineEntry, EngineProfile, ModelEntry, SourceEntry, TensorSpec
from paceline.engines import INDEX_NAME, read_index
from paceline.errors import BundleError, InstallationError, InvalidInputError, PacelineError
from paceline.files import write_whole
from paceline_export.engine import build, store
from paceline_export.engine.backends import BACKENDS, find_backend
from paceline_export.engine.bundle import build_engines
from paceline_export.engine.device import compute_capability, free_bytes
from paceline_export.engine.profiles import ProfileRows, make_profiles
from paceline_export.engine.store import EngineStore

RTX = BACKENDS["tensorrt-rtx"]
PAST = [f"past_key_values.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
SHAPES: dict[str, tuple[int | str, ...]] = {
    "input_ids": ("batch", "rows"),
    "write_indices": ("batch",),
    "logits_indices": ("batch", "num_logits"),
    **dict.fromkeys(PAST, ("batch", 2, 512, 16)),
}
ENTRY = ModelEntry(
    path="target/model.onnx",
    flavor="trt",
    architecture="llama",
    precision="fp16",
    block_size=None,
    num_layers=2,
    num_kv_heads=2,
    head_size=16,
    max_length=512,
    vocab_size=272,
    kv_dtype="float16",
    inputs=tuple(TensorSpec(name, "float16" if name in PAST else "int64", shape) for name, shape in SHAPES.items()),
    outputs=(TensorSpec("logits", "float32", ("batch", "num_logits", 272)),),
    source=SourceEntry("x", "folder", "0" * 64),
)


@pytest.mark.parametrize(
    ("which", "name", "rows", "logits"),
    [
        ("target", "verify", (1, 6, 6), (1, 6, 6)),
        ("target", "prefill", (1, 256, 256), (1, 1, 6)),
        ("draft", "step", (1, 1, 2), (1, 1, 2)),
        ("draft", "prefill", (1, 256, 256), (1, 1, 2)),
    ],
)
def test_profiles_are_those_of_a_speculative_round(
    which: str, name: str, rows: tuple[int, ...], logits: tuple[int, ...]
) -> None:
    profiles = make_profiles(ENTRY, which, max_length=400, max_draft_tokens=5, max_batch=3)
    (found,) = (profile for profile in profiles if profile.name == name)
    batch = (1, 3, 3)
    assert found.shapes == {
        "input_ids": tuple(zip(batch, rows, strict=True)),
        "write_indices": tuple(zip(batch, strict=True)),
        "logits_indices": tuple(zip(batch, logits, strict=True)),
        **dict.fromkeys(PAST, tuple((size, 2, 400, 16) for size in batch)),
    }


def test_pieces_of_a_prompt_are_no_longer_than_the_caches() -> None:
    _, prefill = make_profiles(ENTRY, "target", max_length=64, max_draft_tokens=5, max_batch=1)
    assert [shape[1] for shape in prefill.shapes["input_ids"]] == [1, 64, 64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens must be at least 1, got 0"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_draft_tokens": 512}, "512 drafted tokens take passes of 513 rows, and the caches have 512"),
    ],
)
def test_numbers_that_make_no_profile_are_refused(change: dict[str, int], message: str) -> None:
    numbers: dict[str, Any] = {"max_length": 512, "max_draft_tokens": 4, "max_batch": 1} | change
    with pytest.raises(InvalidInputError, match=message):
        make_profiles(ENTRY, "target", **numbers)


@pytest.mark.parametrize(
    ("sm", "precision"),
    [
        ("7.5", "bf16"),
        ("7.5", "int8"),
        ("7.5", "int4"),
        ("8.6", "fp8"),
        ("9.0", "fp16"),
        ("8.9", "fp32"),
        ("x", "fp16"),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_with_the_table(sm: str, precision: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        RTX.check_target(sm, precision)
    text = str(caught.value)
    assert f"'{sm}' " + (f"cannot hold {precision}" if sm in RTX.targets else "is none that it builds for") in text
    assert "   7.5: fp16\n   8.0: fp16, int8, bf16, int4\n" in text


def test_what_a_gpu_can_hold_is_not() -> None:
    for sm, precision in (
        ("7.5", "fp16"),
        ("8.0", "int8"),
        ("8.0", "int4"),
        ("8.6", "bf16"),
        ("8.9", "fp8"),
        ("12.1", "fp16"),
    ):
        RTX.check_target(sm, precision)
    BACKENDS["tensorrt"].check_target("9.0", "fp8")  # which TensorRT-RTX does not build for


def test_a_backend_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(InvalidInputError, match="Unknown backend 'x': expected one of tensorrt-rtx, tensorrt"):
        find_backend("x")
    with pytest.raises(
        InstallationError, match=r"No module named 'no_such'.*Install it: pip install 'paceline\[trt\]'"
    ):
        dataclasses.replace(RTX, module="no_such").load()
    with pytest.raises(InstallationError, match=r"json .*has no builder: only a part of it is installed"):
        dataclasses.replace(RTX, module="json").load()


def test_profiles_can_be_given() -> None:
    given = (
        ProfileRows("target", "verify", (1, 3, 4)),
        ProfileRows("target", "long", (128, 512, 512)),
        ProfileRows("draft", "step", (1, 2, 2)),
    )
    numbers: dict[str, Any] = {"max_length": 512, "max_draft_tokens": 5, "max_batch": 1}
    profiles = {profile.name: profile.shapes for profile in make_profiles(ENTRY, "target", **numbers, given=given)}
    assert list(profiles) == ["verify", "prefill", "long"]
    assert {name: tuple(shape[1] for shape in shapes["input_ids"]) for name, shapes in profiles.items()} == {
        "verify": (1, 3, 4),
        "prefill": (1, 256, 256),  # which also serves 5 and 6 rows
        "long": (128, 512, 512),
    }
    assert [shape[1] for shape in profiles["long"]["logits_indices"]] == [1, 6, 6]
    step, _ = make_profiles(ENTRY, "draft", **numbers, given=given)
    assert step.shapes["input_ids"] == ((1, 1), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [("target", "verify", (2, 6, 6)), ("target", "prefill", (16, 64, 64))],
            "No profile of the target is for 1 ro",
        ),
        ([("target", "prefill", (1, 256, 1024))], "target:prefill is for 1024 rows, and the caches have 512 positions"),
    ],
)
def test_given_profiles_must_serve_a_round(given: list[tuple[str, str, tuple[int, int, int]]], message: str) -> None:
    rows = [ProfileRows(*each) for each in given]
    with pytest.raises(InvalidInputError, match=message):
        make_profiles(ENTRY, "target", max_length=512, max_draft_tokens=5, max_batch=1, given=rows)


@pytest.mark.parametrize("rows", [(0, 1, 2), (3, 2, 4), (1, 4, 2)])
def test_rows_of_a_profile_rise(rows: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInputError, match="expected a least, a usual and a largest number from 1 on"):
        ProfileRows("target", "x", rows)


class Driver:
    """Answers as NVIDIA's driver does; what it gives back goes through the pointers that it is handed."""

    def __init__(self, *, status: int = 0, count: int = 1) -> None:
        self.status, self.count = status, count

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value = 7000
        return self.status

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_the_gpu_at_hand_is_asked_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, message in ((Driver(status=100), r"finds no GPU \(error 100\)"), (Driver(count=0), "finds no GPU")):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: driver)
        with pytest.raises(InstallationError, match=message):
            compute_capability()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert compute_capability() == "9.0"

    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(InstallationError, match=r"no NVIDIA driver on this machine \(libcuda\.so\.1: cannot open\)"):
        compute_capability()


@pytest.mark.parametrize(("backend", "where"), [("tensorrt", "the GPU's"), ("tensorrt-rtx", "the machine's")])
def test_a_build_without_memory_says_what_is_needed_and_free(
    backend: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    graph = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").write_bytes(bytes(1234))
    said = build._lack_of_memory(
        "[defaultAllocator] Requested amount of GPU memory: out of memory", graph, BACKENDS[backend]
    )
    assert re.search(rf"the weights alone take 1234 bytes, .* and \d+ of {where} are free\. .* --workspace", said)
    if backend == "tensorrt":
        assert "and 7000 of" in said
    assert build._lack_of_memory("Attention was not fused", graph, BACKENDS[backend]) == ""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(status=201))  # no context
    assert free_bytes() is None


def test_tensorrt_builds_for_the_gpu_at_hand_alone(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(damaged, dataclasses.replace(Bundle.open(damaged).manifest, target=ENTRY, draft=None))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with pytest.raises(InvalidInputError, match=r"alone, whose compute capability is 9\.0, got 8\.6\. Leave --sm out"):
        build_engines(bundle, ["8.6"], backend="tensorrt")
    monkeypatch.setitem(BACKENDS, "tensorrt", dataclasses.replace(BACKENDS["tensorrt"], module="no_such"))
    for sms in (None, ["9.0"]):
        with pytest.raises(InstallationError, match=r"tensorrt-cu13 --extra-index-url"):
            build_engines(bundle, sms, backend="tensorrt")


def test_graphs_of_another_flavour_and_useless_options_are_refused(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    with pytest.raises(InvalidInputError, match=r"graph is of the flavour ort, .* export the models with --flavor trt"):
        build_engines(bundle, ["8.9"])
    trt = Bundle(damaged, dataclasses.replace(bundle.manifest, target=ENTRY, draft=None))
    for options, message in (
        ({"sms": []}, "different compute capabilities, got none"),
        ({"sms": None}, r"it must be told which: --sm with some of 7\.5, 8\.0,"),
        ({"profile_rows": [ProfileRows("draft", "step", (1, 1, 2))]}, "names the model 'draft'; expected target"),
        ({"sms": ["8.9", "8.9"]}, "different compute capabilities, got 8.9, 8.9"),
        ({"timing_cache": Path("x")}, "tensorrt-rtx times no kernels when it builds; leave it out"),
        ({"workspace": 0}, "workspace must be a positive number of bytes, got 0"),
        ({"max_length": 513}, "max_length=513 exceeds the 512 positions that the target's graph was exported for"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            build_engines(trt, **({"sms": ["8.9"]} | options))


def engine(bundle: Bundle, sm: str = "8.9", version: str = "1.7") -> EngineEntry:
    profiles = make_profiles(ENTRY, "target", max_length=64, max_draft_tokens=4, max_batch=1)
    graph = bundle.manifest.graph_sha256(bundle.manifest.target)
    return EngineEntry("", "target", "tensorrt-rtx", version, sm, "fp16", graph, 64, 4, 1, profiles, 5, None)


def put(bundle: Bundle, entry: EngineEntry, content: bytes, out: Path | None = None) -> EngineEntry:
    (listed,) = put_shared(bundle, [entry], content, out)
    return listed


def put_shared(
    bundle: Bundle, entries: Sequence[EngineEntry], content: bytes, out: Path | None = None
) -> tuple[EngineEntry, ...]:
    with EngineStore(bundle, out) as store:
        assert store.write(entries, bytearray(content)) == len(content)
        return store.commit()


def test_an_engine_is_listed_with_what_it_was_built_for(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    listed = put(bundle, engine(bundle), b"plan")
    again = Bundle.open(damaged, verify_hashes=True)
    assert again.manifest.engines == (listed,)
    assert again.path(listed.path).read_bytes() == b"plan"
    assert again.manifest.files[listed.path].sha256 == hashlib.sha256(b"plan").hexdigest()
    assert dataclasses.replace(again.manifest, engines=(), files=bundle.manifest.files) == bundle.manifest
    graph = [again.manifest.files[f"target/model.onnx{end}"].sha256 for end in ("", ".data")]
    lines = f"target/model.onnx {graph[0]}\ntarget/model.onnx.data {graph[1]}\n"
    assert listed.graph_sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_an_engine_replaces_that_of_the_same_model_and_gpu(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    first = put(bundle, engine(bundle), b"first")
    other = put(bundle, engine(bundle, "8.6"), b"other")
    second = put(bundle, engine(bundle, version="1.8"), b"second")
    assert Bundle.open(damaged, verify_hashes=True).manifest.engines == (other, second)
    assert sorted(path.name for path in (damaged / "engines").iterdir()) == sorted(
        Path(entry.path).name for entry in (other, second)
    )
    assert first.path != second.path
    assert put(bundle, engine(bundle, version="1.8"), b"second") == second  # of the same bytes


def test_an_engine_that_serves_several_gpus_is_one_file(damaged: Path) -> None:
    """It stays until an engine of each of them has taken its place."""
    bundle = Bundle.open(damaged)
    both = put_shared(bundle, [engine(bundle, "8.6"), engine(bundle, "8.9")], b"both")
    assert [entry.sm for entry in both] == ["8.6", "8.9"]
    (path,) = {entry.path for entry in both}
    assert path.startswith("engines/target-tensorrt-rtx-sm86-89-")
    alone = put(bundle, engine(bundle, "8.6"), b"alone")
    again = Bundle.open(damaged, verify_hashes=True)
    assert again.manifest.engines == (both[1], alone)
    assert (damaged / path).read_bytes() == b"both"
    assert path in again.manifest.files
    last = put(bundle, engine(bundle, "8.9"), b"last")
    again = Bundle.open(damaged, verify_hashes=True)
    assert again.manifest.engines == (alone, last)
    assert path not in again.manifest.files
    assert sorted((damaged / "engines").iterdir()) == sorted(damaged / entry.path for entry in (alone, last))


def test_gpus_share_an_engine_where_the_backend_can_serve_them_with_one() -> None:
    assert RTX.groups(["8.9", "7.5", "8.6"]) == [("8.9", "8.6"), ("7.5",)]
    assert RTX.groups(["7.5"]) == [("7.5",)]
    assert BACKENDS["tensorrt"].groups(["8.9"]) == [("8.9",)]


def test_without_a_commit_nothing_stays(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    before = sorted(damaged.rglob("*")), (damaged / "paceline.json").read_text()

    def fail() -> None:
        with EngineStore(bundle, None) as store:
            store.write([engine(bundle)], b"plan")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (sorted(damaged.rglob("*")), (damaged / "paceline.json").read_text()) == before


def test_what_a_killed_build_left_is_cleared_away(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    (damaged / "engines").mkdir()
    (damaged / "engines" / ".target-8.9.partial-999999999").write_bytes(b"half")
    running = damaged / "engines" / f".draft-8.9.partial-{os.getppid()}"
    running.write_bytes(b"half")
    listed = put(bundle, engine(bundle), b"plan")
    assert sorted((damaged / "engines").iterdir()) == sorted([damaged / listed.path, running])


def test_engines_may_have_a_folder_of_their_own(damaged: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(damaged)
    before = (damaged / "paceline.json").read_text()
    first, second = (put(bundle, engine(bundle, sm), sm.encode(), tmp_path / "out") for sm in ("8.6", "8.9"))
    index = read_index(tmp_path / "out")
    assert index.engines == (first, second)
    assert {name: entry.size for name, entry in index.files.items()} == {first.path: 3, second.path: 3}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([first.path, second.path, INDEX_NAME])
    assert (damaged / "paceline.json").read_text() == before
    with pytest.raises(InvalidInputError, match="is a bundle; leave -o out"):
        put(bundle, engine(bundle), b"x", damaged)


def test_a_folder_that_cannot_be_written_is_told_before_any_build(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(damaged)
    before, touch = sorted(damaged.rglob("*")), Path.touch

    def refuse(folder: Path, out: Path | None, message: str) -> None:
        def refusing(path: Path) -> None:
            if path.parent == folder:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            touch(path)

        monkeypatch.setattr(Path, "touch", refusing)
        with pytest.raises(PacelineError) as caught, EngineStore(bundle, out):
            pytest.fail("it was entered")
        assert f"{folder} cannot be written (Permission denied); {message}, or mend its permissions" in str(
            caught.value
        )

    refuse(damaged, None, "pass -o FOLDER for engines elsewhere, which --engines FOLDER loads")
    refuse(damaged / "engines", None, "pass -o FOLDER for engines elsewhere, which --engines FOLDER loads")
    refuse(tmp_path / "out", tmp_path / "out", "name another folder with -o")
    assert sorted(damaged.rglob("*")) == before
    assert not (tmp_path / "out").exists()
    (damaged / "engines").write_bytes(b"")
    with pytest.raises(PacelineError, match=r"cannot be written \(File exists\)"), EngineStore(bundle, None):
        pytest.fail("it was entered")


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), KeyboardInterrupt()])
@pytest.mark.parametrize("own", [False, True])
def test_engines_that_cannot_be_listed_are_removed(
    own: bool, error: BaseException, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, out = Bundle.open(damaged), tmp_path / "out" if own else None
    first = put(bundle, engine(bundle), b"first", out)
    root = out or damaged
    before = sorted(root.rglob("*"))

    def fail(path: Path, text: str) -> None:
        assert len(list(root.rglob("*.engine"))) == 2
        raise error

    monkeypatch.setattr(store, "write_whole", fail)
    with pytest.raises(PacelineError if isinstance(error, OSError) else KeyboardInterrupt):
        put(bundle, engine(bundle), b"second", out)
    assert sorted(root.rglob("*")) == before
    monkeypatch.undo()

    def late(path: Path, text: str) -> None:
        write_whole(path, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_whole", late)
    with pytest.raises(KeyboardInterrupt):
        put(bundle, engine(bundle), b"third", out)
    (listed,) = read_index(root).engines if own else Bundle.open(root).manifest.engines
    assert listed.path != first.path
    assert (root / listed.path).read_bytes() == b"third"


@pytest.mark.parametrize("left", [None, b"fir"])
def test_a_lost_engine_is_built_again(left: bytes | None, damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    first = put(bundle, engine(bundle), b"first")
    path = damaged / first.path
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    bundle = Bundle.open(damaged, verify_hashes=True)  # what uses no engine goes on
    with pytest.raises(BundleError, match=r"`paceline build .* --backend tensorrt-rtx --sm 8\.9`"):
        bundle.check_files(verify_hashes=False)
    assert put(bundle, engine(bundle), b"first") == first
    Bundle.open(damaged).check_files(verify_hashes=True)
    path.unlink()
    second = put(bundle, engine(bundle), b"second")
    assert Bundle.open(damaged).manifest.engines == (second,)


@pytest.mark.parametrize(
    "shapes", [((1, 1), (2, 2)), ((1,), (2, 2), (2, 2)), ((1, 1), (2, 3), (2, 2)), ((0, 1), (2, 2), (2, 2))]
)
def test_a_profile_rises_from_its_least_shape_to_its_largest(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(BundleError, match="expected a least, a usual and a largest shape of one rank"):
        EngineProfile("x", {"input_ids": shapes})


def test_an_engine_must_be_among_the_files(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    put(bundle, engine(bundle), b"plan")
    manifest = json.loads((damaged / "paceline.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith("engines/")}
    (damaged / "paceline.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"names the engine 'engines/.* but does not list it among its files"):
        Bundle.open(damaged)
