"""OpenVINO's plugin on a real checkpoint: attention stays with the CPU's provider, in place, and texts are the CPU's.

The plugin is the extra `openvino`; without it these tests are skipped. It offers a device on Intel's processors only.
Elsewhere it is tested that loading says so, and the rest is skipped, unless PACELINE_TEST_PATCHED_OPENVINO is 1: on
AMD's processors it then runs with a patched copy of the plugin (`openvino_plugin.py`), which no user has.

The plugin runs in processes of its own, whose threads the first model settles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import InstallationError

from .openvino_plugin import ASKED, OFFERS_A_DEVICE, PACKAGE, installed_folder, patched_folder

PROMPT = "def mean(xs):\n    s = 0\n    for x in xs:\n        s += x\n"
KS = (0, 1, 2, 4)
PROGRAM = """
    import json, sys
    from collections import Counter
    import numpy as np
    import paceline

    folder, prompt, ks = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    decoder, cpu = (paceline.load(folder, provider=name, profile=None) for name in ("openvino", "cpu"))
    found = {"assigned": [], "differences": [], "texts": {}}
    model, other = decoder.target, cpu.target
    for part in model.session.get_provider_graph_assignment_info():
        found["assigned"] += [[part.ep_name, node.op_type] for node in part.get_nodes()]
    found["memories"] = [
        memory.name
        for value, memory in zip(model.session.get_inputs(), model.session.get_input_memory_infos(), strict=True)
        if value.name.startswith("past_key_values.")
    ]

    def texts(decoder, **options):
        made = []
        for k in ks:
            generation = decoder.generate(prompt, max_new_tokens=32, num_draft_tokens=k)
            list(generation)
            made.append(list(generation.token_ids))
        return made

    found["texts"] = {"openvino": texts(decoder), "cpu": texts(cpu)}
    graphs = paceline.load(folder, provider="openvino", sampler="graph", profile=None)
    found["texts"]["graph"] = texts(graphs)

    # A prefill, a block of which some is taken back, a block again: against the CPU's provider in fp32.
    tokens = decoder.tokenizer.encode(prompt)
    caches = model.new_cache(64), other.new_cache(64)
    for step, kept in ((tokens[:12], 12), (tokens[12:17], 2), (tokens[14:19], 5), (tokens[19:20], 1)):
        logits = [
            one.forward(step, cache, len(step)).copy() for one, cache in zip((model, other), caches, strict=True)
        ]
        found["differences"].append(float(np.abs(logits[0] - logits[1]).max()))
        for cache in caches:
            cache.rollback(cache.length - len(step) + kept)

    # Keys and values are written in place, and only those of the step.
    cache = model.new_cache(64)
    addresses = [buffer.ctypes.data for buffer in cache.buffers]
    model.forward(tokens[:3], cache, 1)
    before = [buffer[:, :, :3].copy() for buffer in cache.buffers]
    for buffer in cache.buffers:
        buffer[:, :, 4:] = 7.5
    model.forward(tokens[3:4], cache, 1)
    found["in_place"] = all(
        (buffer[:, :, :3] == old).all() and (buffer[:, :, 4:] == 7.5).all() and np.abs(buffer[:, :, 3]).max() > 0
        for buffer, old in zip(cache.buffers, before, strict=True)
    ) and addresses == [buffer.ctypes.data for buffer in cache.buffers]
    print(json.dumps(found))
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


@pytest.fixture(scope="module")
def installed() -> Path:
    folder = installed_folder()
    if folder is None:
        pytest.skip(f"{PACKAGE} is not installed")
    return folder


@pytest.fixture(scope="module")
def folder(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plugin that offers this processor."""
    if OFFERS_A_DEVICE:
        return installed
    if not ASKED:
        pytest.skip("OpenVINO's plugin offers no device here; see the head of this file")
    return patched_folder(installed, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def found(folder: Path, smol_bundle: Path) -> dict[str, Any]:
    arguments = [str(smol_bundle), PROMPT, json.dumps(KS)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_attention_stays_with_the_cpus_provider_and_the_rest_does_not(found: dict[str, Any]) -> None:
    assert {name for name, kind in found["assigned"] if kind == "GroupQueryAttention"} == {"CPUExecutionProvider"}
    others = [name for name, kind in found["assigned"] if kind != "GroupQueryAttention"]
    assert others.count("OpenVINOExecutionProvider") > 0.9 * len(others) > 100
    assert set(found["memories"]) == {"Cpu"}


def test_keys_and_values_are_written_in_place(found: dict[str, Any]) -> None:
    assert found["in_place"]


def test_its_logits_are_those_of_fp32(found: dict[str, Any]) -> None:
    assert max(found["differences"]) < 2e-3


def test_greedy_speculative_is_the_cpus_greedy_plain(found: dict[str, Any]) -> None:
    plain = found["texts"]["cpu"][0]
    assert len(plain) == 32
    for name, texts in found["texts"].items():
        for k, text in zip(KS, texts, strict=True):
            assert text == plain, f"{name}, K={k}"


@pytest.mark.skipif(OFFERS_A_DEVICE, reason="the plugin offers this processor")
@pytest.mark.usefixtures("installed")
def test_on_another_makers_processor_the_plugin_does_not_start(tiny_bundle: Path) -> None:
    with pytest.raises(InstallationError, match=r"finds no device that it supports\. Its plugin offers Intel's"):
        paceline.load(tiny_bundle, provider="openvino")
