from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import CheckpointError
from paceline_export.source import Source, resolve


def write_config(folder: Path, **more: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **more}), encoding="utf-8")


def write_shards(folder: Path, names: tuple[str, ...]) -> None:
    write_config(folder)
    for i, name in enumerate(names):
        if "/" not in name:
            save_file({f"w{i}": np.full((2, 3), i, np.float32)}, folder / name)
    weight_map = {f"w{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ä"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("scale", 0.5)
    writer.add_bool("flag", True)
    writer.add_tensor("first", np.zeros((4, 32), np.float32))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("second", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_with_one_safetensors_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_config(folder)
    save_file({"w": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    source = resolve(str(folder))
    assert source == Source("model", "folder", folder, None, (folder / "model.safetensors",))
    assert source.sha256() == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_shards_are_hashed_in_order_of_their_names(tmp_path: Path) -> None:
    names = ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors")
    write_shards(tmp_path, names)
    source = resolve(str(tmp_path))
    assert [path.name for path in source.weight_files] == sorted(names)
    pieces: list[int] = []
    expected = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in sorted(names))).hexdigest()
    assert source.sha256(pieces.append) == expected
    assert sum(pieces) == sum((tmp_path / name).stat().st_size for name in names)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, ("a.safetensors", "b.safetensors"))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard 'b.safetensors' is missing, one of 2"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "a/../../b.safetensors"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, (name,))
    with pytest.raises(CheckpointError, match="not a safe relative path"):
        resolve(str(tmp_path))


def test_a_shard_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, ("a.safetensors",))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.bin"}}')
    with pytest.raises(CheckpointError, match=r"not a .safetensors file"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"w": 1}}', "[]", "{"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_only_pickles_are_refused_with_the_reason_and_the_mend(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CheckpointError, match=rf"only as pickles \({name}\), which can run any code.*save_pretrained"):
        resolve(str(tmp_path))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json"):
        resolve(str(tmp_path))
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="only an adapter"):
        resolve(str(tmp_path))


def test_remote_code_is_refused_but_not_an_architecture_that_transformers_knows(tmp_path: Path) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    auto_map = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    write_config(tmp_path, model_type="mine", auto_map=auto_map)
    with pytest.raises(CheckpointError, match=r"'mine' needs remote code \('auto_map'\).*runs no code"):
        resolve(str(tmp_path))
    write_config(tmp_path, model_type="qwen2", auto_map=auto_map)
    assert resolve(str(tmp_path)).kind == "folder"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
    with pytest.raises(CheckpointError, match="its tokenizer needs remote code"):
        resolve(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize("config", ["{}", "[]", "no json", '{"model_type": 3}'])
def test_a_broken_config_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config.json"):
        resolve(str(tmp_path))


def test_a_truncated_safetensors_file_is_refused_with_its_sizes(tmp_path: Path) -> None:
    write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros((8, 8), np.float32)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            resolve(str(tmp_path))
    path.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=f"truncated: it has {len(whole) - 7} bytes.*asks for {len(whole)}"):
        resolve(str(tmp_path))
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        resolve(str(tmp_path))
    path.write_bytes((5).to_bytes(8, "little") + b"[1,2]")
    with pytest.raises(CheckpointError, match="header cannot be read"):
        resolve(str(tmp_path))


def test_a_gguf_file_by_itself_and_in_a_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf")
    source = resolve(str(path))
    assert source == Source("one.gguf", "gguf", tmp_path, "one.gguf", (path,))
    assert resolve(str(tmp_path)) == source
    write_gguf(tmp_path / "two.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(one.gguf, two.gguf\); name one"):
        resolve(str(tmp_path))


def test_a_truncated_gguf_is_refused_at_every_length(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf")
    whole = path.read_bytes()
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)
    for size in range(4, end):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            resolve(str(path))
    path.write_bytes(whole[: end - 1])
    with pytest.raises(CheckpointError, match=f"it has {end - 1} bytes, its tensors end at {end}"):
        resolve(str(path))


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it starts with b'PK"):
        resolve(str(path))
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(str(path))
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little"))
    with pytest.raises(CheckpointError, match="GGUF version 99"):
        resolve(str(path))
    weights = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, weights)
    with pytest.raises(CheckpointError, match="name its folder"):
        resolve(str(weights))


def test_one_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("w", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"one of 2 parts; merge them"):
        resolve(str(tmp_path / "a-00001-of-00002.gguf"))


def test_an_unknown_name_lists_the_recipes_the_near_ones_and_the_forms() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve("smolm2-135m")
    text = str(caught.value)
    assert "Did you mean 'smollm2-135m'" in text
    assert "qwen2.5-coder-0.5b" in text
    for form in ("folder with config.json", ".gguf file", "hub id 'org/name'", "recipe's name"):
        assert form in text
    with pytest.raises(CheckpointError, match=r"'qwen2.5-coder-0.5b'"):
        resolve("qwen")


@pytest.mark.parametrize("text", ["./none/at/all", "/none/at/all", "none.gguf", "org/none.gguf"])
def test_a_path_that_does_not_exist_is_told(text: str) -> None:
    with pytest.raises(CheckpointError, match=f"no file or folder '{text}'"):
        resolve(text)


def test_a_pair_is_not_a_source() -> None:
    with pytest.raises(CheckpointError, match="names a pair"):
        resolve("qwen2.5-coder")


def test_a_source_checks_itself(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kind"):
        Source("x", "torrent", tmp_path, None, (tmp_path,))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="sorted and not empty"):
        Source("x", "folder", tmp_path, None, ())


def test_importing_sources_loads_nothing_heavy() -> None:
    code = (
        "import sys, paceline_export.source; "
        "print(*({'torch', 'transformers', 'onnx', 'huggingface_hub', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
