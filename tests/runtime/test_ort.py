"""ONNX Runtime on a real checkpoint: caches in place, rollback, threads, and greedy speculative = greedy plain."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import SamplingParams, SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME, Bundle, Manifest, file_sha256
from paceline.errors import BundleError, InstallationError, InvalidInputError
from paceline.ort import PREFILL_ROWS, OrtModel
from paceline.ort_session import import_onnxruntime
from paceline.testing import ScriptedDrafter

PROMPTS = (
    "Write a Python function that merges two sorted lists into one sorted list, with type hints and a docstring.",
    "Explain how a hash map handles collisions, in two paragraphs.",
    "Fix the bug in this code:\n\ndef mean(xs):\n    s = 0\n    for x in xs:\n        s += x\n    return s / len(x)\n",
)
# Largest difference of a logit between two orders of the same float32 sums.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def decoder(smol_bundle: Path) -> SpeculativeDecoder:
    return paceline.load(smol_bundle)


@pytest.fixture(scope="module")
def model(decoder: SpeculativeDecoder) -> OrtModel:
    assert isinstance(decoder.target, OrtModel)
    return decoder.target


@pytest.fixture(scope="module")
def itself(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The target as its own draft."""
    return SpeculativeDecoder(
        decoder.target, decoder.target, decoder.tokenizer, decoder.vocab_size, decoder.eos_token_ids
    )


def chat(decoder: SpeculativeDecoder, prompt: str) -> list[int]:
    assert decoder.tokenizer is not None
    return decoder.tokenizer.encode_chat([{"role": "user", "content": prompt}])


def greedy(decoder: SpeculativeDecoder, prompt: list[int], k: int, **options: object) -> paceline.Generation:
    generation = decoder.generate(prompt, max_new_tokens=32, num_draft_tokens=k, **options)  # type: ignore[arg-type]
    list(generation)
    return generation


@pytest.mark.parametrize(
    ("prompt", "ks"),
    [
        (0, (1, 4)),
        (1, (2, 5)),
        (2, (3, 6)),
        *(pytest.param(prompt, range(1, 7), marks=pytest.mark.slow) for prompt in range(3)),
    ],
)
def test_greedy_speculative_is_greedy_plain(
    decoder: SpeculativeDecoder, itself: SpeculativeDecoder, prompt: int, ks: Sequence[int]
) -> None:  # cases 23, 24
    ids = chat(decoder, PROMPTS[prompt])
    plain = greedy(decoder, ids, 0)
    for k in ks:
        assert greedy(itself, ids, k).token_ids == plain.token_ids, f"own draft, K={k}"
        assert greedy(decoder, ids, k).token_ids == plain.token_ids, f"int4 draft, K={k}"
        text = [*ids, *plain.token_ids]
        right = greedy(decoder, ids, k, drafter=ScriptedDrafter(text))
        assert right.token_ids == plain.token_ids, f"always right, K={k}"
        assert right.stats.acceptance_rate == 1
        wrong = greedy(decoder, ids, k, drafter=ScriptedDrafter.always_wrong(text, vocab_size=decoder.vocab_size))
        assert wrong.token_ids == plain.token_ids, f"always wrong, K={k}"
        assert wrong.stats.accepted == 0
        assert wrong.stats.block_efficiency == 1


def test_a_prompt_of_a_single_id(itself: SpeculativeDecoder) -> None:  # case 7
    plain = greedy(itself, [10], 0)
    for k in (1, 2, 5):
        assert greedy(itself, [10], k).token_ids == plain.token_ids


def test_the_live_cache_gives_the_logits_of_a_fresh_prefill(model: OrtModel) -> None:  # case 29
    rng = np.random.default_rng(0)
    cache = model.new_cache(256)
    tokens = rng.integers(0, model.vocab_size, 20).tolist()
    model.forward(tokens, cache, 1)
    for kept in (0, 3, 1, 5, 2, 4):
        block = rng.integers(0, model.vocab_size, 5).tolist()
        live = model.forward(block, cache, 5).copy()
        fresh_cache = model.new_cache(256)
        fresh = model.forward([*tokens, *block], fresh_cache, 5)
        np.testing.assert_allclose(live, fresh, atol=TOLERANCE)
        tokens += block[:kept]
        cache.rollback(len(tokens))
        assert cache.length == len(tokens)


def test_keys_and_values_are_written_in_place_and_stay(model: OrtModel) -> None:  # cases 27, 28
    """Past and present are one buffer: a step writes its own positions, copies nothing and moves nothing."""
    cache = model.new_cache(64)
    addresses = [buffer.ctypes.data for buffer in cache.buffers]
    model.forward([5, 6, 7], cache, 1)
    before = [buffer[:, :, :3].copy() for buffer in cache.buffers]
    for buffer in cache.buffers:
        assert np.abs(buffer[:, :, :3]).max() > 0
        buffer[:, :, 4:] = 7.5  # what lies behind the next position is not read and not written
    model.forward([8], cache, 1)
    for buffer, old in zip(cache.buffers, before, strict=True):
        np.testing.assert_array_equal(buffer[:, :, :3], old)
        assert np.abs(buffer[:, :, 3]).max() > 0
        assert (buffer[:, :, 4:] == 7.5).all()
    assert [buffer.ctypes.data for buffer in cache.buffers] == addresses


def test_separate_past_and_present_give_the_same_logits(model: OrtModel) -> None:  # case 28
    tokens, block = [5, 6, 7, 8], [9, 10]
    cache = model.new_cache(64)
    model.forward(tokens, cache, 1)
    past = {name: buffer.copy() for name, buffer in zip(model.past_names, cache.buffers, strict=True)}
    shared = model.forward(block, cache, 2).copy()
    feeds = past | {
        "input_ids": np.array([block], np.int64),
        "seqlens_k": np.array([5], np.int32),
        "total_sequence_length": np.array(6, np.int32),
        "logits_indices": np.array([0, 1], np.int64),
    }
    (separate,) = model.session.run(["logits"], feeds)
    np.testing.assert_allclose(separate[0], shared, atol=1e-5)


def test_a_long_prompt_in_pieces_is_the_prompt_at_once(model: OrtModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 2 * PREFILL_ROWS + 37).tolist()
    pieces = model.forward(tokens, model.new_cache(1024), 3).copy()
    monkeypatch.setattr("paceline.ort.PREFILL_ROWS", 10_000)
    whole = model.forward(tokens, model.new_cache(1024), 3)
    np.testing.assert_allclose(pieces, whole, atol=TOLERANCE)


def test_a_generation_reads_a_long_prompt_in_pieces(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(300, 340))
    expected = decoder.generate(prompt, max_new_tokens=4, num_draft_tokens=0)
    list(expected)
    monkeypatch.setattr("paceline.ort.PREFILL_ROWS", 16)
    generation = decoder.generate(prompt, max_new_tokens=4, num_draft_tokens=0)
    parts = [generation.advance() for _ in range(3)]
    assert [part is None for part in parts] == [True, True, False]  # 16, 16, and the 8 that are left
    list(generation)
    assert generation.token_ids == expected.token_ids


def test_logits_are_computed_for_the_wanted_rows_only(model: OrtModel) -> None:
    cache = model.new_cache(512)
    logits = model.forward(list(range(5, 305)), cache, 2)
    assert logits.shape == (2, model.vocab_size)
    assert len(cache._logits) == 2  # the buffer never held a row per token of the prompt


def test_an_ample_cache_costs_memory_only_as_it_fills(smol_bundle: Path) -> None:
    code = f"""
        import resource
        from pathlib import Path
        from paceline.bundle import Bundle
        from paceline.ort import OrtModel
        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
        model = OrtModel.open(Bundle.open({str(smol_bundle)!r}), "target")
        for earlier in range(2):  # memory that the heap recycles would be cleared
            cache = model.new_cache(1024)
            for buffer in cache.buffers:
                buffer[:] = 1
            del cache, buffer
        before = resident()
        cache = model.new_cache(8192)
        assert sum(buffer.nbytes for buffer in cache.buffers) > 350e6
        assert not any(buffer.any() for buffer in model.new_cache(64).buffers)
        print(resident() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000  # KiB


@pytest.mark.parametrize(
    ("tokens", "num_logits", "message"),
    [
        ([], 1, "at least 1 is needed"),
        ([1] * 65, 1, "room for 64"),
        ([1, 2], 3, "between 1 and the 2 tokens"),
        ([1, 2], 0, "between 1 and the 2 tokens"),
        ([1, -1], 1, "Token id -1 is outside"),
        ([1, 10**6], 1, "Token id 1000000 is outside"),
    ],
)
def test_bad_forwards_are_refused_and_leave_the_cache(
    model: OrtModel, tokens: list[int], num_logits: int, message: str
) -> None:
    cache = model.new_cache(64)
    with pytest.raises(InvalidInputError, match=message):
        model.forward(tokens, cache, num_logits)
    assert cache.length == 0


def test_a_cache_serves_its_own_model_only(decoder: SpeculativeDecoder, model: OrtModel) -> None:
    assert decoder.draft is not None
    with pytest.raises(InvalidInputError, match="made by another model"):
        model.forward([1], decoder.draft.new_cache(8), 1)
    with pytest.raises(InvalidInputError, match="exceeds the model's 8192"):
        model.new_cache(8193)


def test_generations_from_several_threads_are_independent(decoder: SpeculativeDecoder) -> None:  # case 26
    def run(seed: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
        generation = decoder.generate(chat(decoder, PROMPTS[1]), sampling, max_new_tokens=16, num_draft_tokens=2)
        list(generation)
        return generation.token_ids

    alone = [run(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(4)))
    assert together == alone
    assert len(set(alone)) == 4


def test_text_streams_in_whole_characters_and_is_the_decoded_ids(decoder: SpeculativeDecoder) -> None:
    assert decoder.tokenizer is not None
    ids = chat(decoder, "Write a line of emoji: 🙂🚀, then Chinese: 你好.")
    generation = decoder.generate(ids, SamplingParams(1.5, seed=3), max_new_tokens=64, num_draft_tokens=3)
    pieces = [step.text for step in generation]
    assert "".join(pieces) == generation.text == decoder.tokenizer.decode(generation.token_ids)


# What may be wrong with a bundle or an installation.


def rewrite_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    change(data)
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))


def test_a_truncated_file_is_named(damaged: Path) -> None:
    path = damaged / "draft/model.onnx.data"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(BundleError, match=f"'draft/model.onnx.data' has {len(content) - 100} bytes"):
        paceline.load(damaged)


@pytest.mark.parametrize("name", ["tokenizer.json", "target/model.onnx", "draft/model.onnx.data"])
def test_a_missing_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    with pytest.raises(BundleError, match=f"{re.escape(repr(name))} is missing"):
        paceline.load(damaged)


def test_an_altered_file_fails_its_hash(damaged: Path) -> None:
    path = damaged / "draft/model.onnx.data"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    Bundle.open(damaged)
    with pytest.raises(BundleError, match="has SHA-256"):
        Bundle.open(damaged, verify_hashes=True)


def test_a_newer_format_is_refused(damaged: Path) -> None:
    rewrite_manifest(damaged, lambda data: data.update(format_version=2))
    with pytest.raises(BundleError, match=r"has format 2, this paceline reads format 1; upgrade"):
        paceline.load(damaged)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", ""])
def test_a_listed_path_outside_the_bundle_is_refused(damaged: Path, name: str) -> None:
    rewrite_manifest(damaged, lambda data: data["files"].update({name: {"size": 1, "sha256": "0"}}))
    with pytest.raises(BundleError, match="Unsafe file name"):
        paceline.load(damaged)


def test_a_link_out_of_the_bundle_is_refused(damaged: Path, tmp_path: Path) -> None:
    path = damaged / "draft/model.onnx.data"
    shutil.move(path, tmp_path / "outside.data")
    path.symlink_to(tmp_path / "outside.data")
    with pytest.raises(BundleError, match="leads out of the bundle"):
        paceline.load(damaged)


def test_graphs_that_are_not_those_of_the_manifest_are_refused(damaged: Path) -> None:
    rewrite_manifest(damaged, lambda data: data["draft"]["inputs"][0].update(name="tokens"))
    with pytest.raises(BundleError, match="are not those of the manifest"):
        paceline.load(damaged)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 1),
        ("num_layers", 2**31),
        ("num_kv_heads", 7),
        ("head_size", 2**31),
        ("vocab_size", 2**31),
        ("kv_dtype", "float16"),
    ],
)
def test_figures_that_contradict_the_graph_are_refused(damaged: Path, field: str, value: object) -> None:
    rewrite_manifest(damaged, lambda data: data["target"].update({field: value}))
    with pytest.raises(BundleError, match=r"the manifest contradicts itself|must be from 1 to"):
        paceline.load(damaged)


def test_a_manifest_that_agrees_with_itself_but_not_with_its_graph_is_refused(damaged: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["target"]["vocab_size"] = data["target"]["outputs"][0]["shape"][2] = 300

    rewrite_manifest(damaged, change)
    with pytest.raises(BundleError, match="are not those of the manifest"):
        paceline.load(damaged)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "", "\ufeff{}", "null"])
def test_a_manifest_that_is_no_json_object_is_refused(damaged: Path, text: str) -> None:
    (damaged / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match=r"not valid JSON|not a paceline bundle"):
        paceline.load(damaged)


def test_a_chat_template_that_is_not_utf8_is_refused(damaged: Path) -> None:
    (damaged / "chat_template.jinja").write_bytes(b"\xff\xfe")
    rewrite_manifest(
        damaged, lambda data: data["files"].update({"chat_template.jinja": {"size": 2, "sha256": "0" * 64}})
    )
    with pytest.raises(BundleError, match="is not UTF-8"):
        paceline.load(damaged)


def test_a_chat_template_that_the_manifest_does_not_list_is_not_read(damaged: Path) -> None:
    (damaged / "chat_template.jinja").write_bytes(b"\xff\xfe")
    tokenizer = paceline.load(damaged).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template is None


def test_weights_that_the_manifest_does_not_list_are_refused(damaged: Path) -> None:
    rewrite_manifest(damaged, lambda data: data["files"].pop("draft/model.onnx.data"))
    with pytest.raises(BundleError, match=r"'draft/model.onnx.data' lies beside a graph, but the manifest does not"):
        paceline.load(damaged)


def test_a_graph_that_is_no_graph_is_refused(damaged: Path) -> None:
    path = damaged / "draft/model.onnx"
    path.write_bytes(b"not a graph")
    entry = {"size": len(b"not a graph"), "sha256": file_sha256(path)}
    rewrite_manifest(damaged, lambda data: data["files"].update({"draft/model.onnx": entry}))
    with pytest.raises(BundleError, match="cannot load"):
        paceline.load(damaged)


def test_both_packages_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "packages_distributions", lambda: {"onnxruntime": ["onnxruntime", "onnxruntime-gpu"]}
    )
    with pytest.raises(InstallationError, match=r"onnxruntime and onnxruntime-gpu are both installed.*pip uninstall"):
        import_onnxruntime()


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InstallationError, match=r"pip install 'paceline\[cpu\]'"):
        import_onnxruntime()


def test_unknown_providers_and_threads_are_refused(smol_bundle: Path, decoder: SpeculativeDecoder) -> None:
    with pytest.raises(InvalidInputError, match="Unknown provider 'tpu': expected one of cpu"):
        paceline.load(smol_bundle, provider="tpu")
    with pytest.raises(InvalidInputError, match="threads must be an integer from 1 to 1024"):
        paceline.load(smol_bundle, threads=0)
    with pytest.raises(InvalidInputError, match="comes too late"):
        paceline.load(smol_bundle, threads=97)


@pytest.mark.parametrize("before", ["ort.InferenceSession(graph)", "ort.set_global_thread_pool_sizes(2, 1)"])
def test_a_process_that_uses_onnxruntime_already_can_load_a_bundle(smol_bundle: Path, before: str) -> None:
    code = f"""
        import onnxruntime as ort, paceline
        graph = {str(smol_bundle / "draft/model.onnx")!r}
        session = {before}
        generation = paceline.load({str(smol_bundle)!r}).generate([5, 6], max_new_tokens=4)
        list(generation)
        print(len(generation.token_ids))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


@pytest.mark.skipif(sys.platform != "linux", reason="where ONNX Runtime keeps its events elsewhere")
def test_nothing_is_kept_for_sending_to_microsoft(tiny_bundle: Path, tmp_path: Path) -> None:
    code = f"import paceline; list(paceline.load({str(tiny_bundle)!r}).generate([5, 6], max_new_tokens=4))"
    left = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR"), str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, env=left | homes)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name or path.name == ".ses"] == []


def test_the_manifest_survives_a_round_trip(smol_bundle: Path) -> None:
    manifest = Bundle.open(smol_bundle).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
