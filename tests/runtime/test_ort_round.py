"""Rounds over a bundle's sampler graphs: the text of numpy, and what they refuse."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import SamplingParams, SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME
from paceline.drafters import DraftModelDrafter
from paceline.errors import BundleError, InvalidInputError, ModelOutputError, NoTokenLeftError
from paceline.ort_sampler import GraphInputs
from paceline.testing import ScriptedDrafter
from paceline_export.sampler.verify import greedy_verifier

PROMPT = "hello the"
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(1.0),
    "top-p": SamplingParams(0.8, top_p=0.9),
    "top-k, min-p": SamplingParams(1.2, top_k=20, min_p=0.05),
    "typical-p": SamplingParams(1.0, typical_p=0.8),
    "penalties": SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "greedy penalties": SamplingParams(repetition_penalty=1.4, min_new_tokens=10),
    "bias": SamplingParams(1.0, logit_bias={5: 3.0, 7: -2.0}, banned_token_ids=(1, 2, 3)),
    "forced": SamplingParams(1.0, forced_token_ids=(10, 11, 12)),
    "forced end": SamplingParams(1.0, forced_token_ids=(10, 260)),
    "min-new": SamplingParams(0.7, min_new_tokens=20),
}


@pytest.fixture(scope="module")
def decoders(tiny_bundle: Path) -> tuple[SpeculativeDecoder, SpeculativeDecoder]:
    return paceline.load(tiny_bundle), paceline.load(tiny_bundle, sampler="graph")


def both(decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    """What both samplers make of the same request: ids, and how many drafted tokens stood in every round."""
    texts = []
    for decoder in decoders:
        generation = decoder.generate(*args, **options)
        steps = [(step.num_proposed, step.num_accepted) for step in generation]
        texts.append((generation.token_ids, steps, generation.finish_reason))
    return texts


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_that_of_numpy(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], name: str, num_draft_tokens: int, rule: str
) -> None:
    for seed in (1, 2):
        sampling = replace(SAMPLINGS[name], seed=seed)
        ours, theirs = both(
            decoders, PROMPT, sampling, num_draft_tokens=num_draft_tokens, max_new_tokens=30, verification=rule
        )
        assert ours == theirs


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drafted_behind_an_end_token_does_not_count(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], temperature: float, rule: str
) -> None:
    options = {"stop_token_ids": tuple(range(0, 262, 4)), "num_draft_tokens": 6, "verification": rule}
    for draft_sampling in (SamplingParams(1.0), SamplingParams()):
        for seed in range(20):
            sampling = SamplingParams(temperature, seed=seed)
            ours, theirs = both(decoders, PROMPT, sampling, draft_sampling=draft_sampling, **options)
            assert ours == theirs


@pytest.mark.parametrize("draft_sampling", [SamplingParams(), SamplingParams(2.0, top_k=5)])
def test_the_draft_may_be_sampled_in_another_way(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], draft_sampling: SamplingParams
) -> None:
    for sampling in (SamplingParams(seed=3), SamplingParams(0.9, seed=3)):
        ours, theirs = both(
            decoders, PROMPT, sampling, draft_sampling=draft_sampling, num_draft_tokens=3, max_new_tokens=40
        )
        assert ours == theirs


def test_generations_over_one_decoder_do_not_disturb_each_other(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder],
) -> None:
    _, decoder = decoders
    alone = [list(decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=20)) for seed in (1, 2)]
    first, second = (decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=20) for seed in (1, 2))
    together = list(itertools.zip_longest(first, second))
    assert [step for step, _ in together if step] == alone[0]
    assert [step for _, step in together if step] == alone[1]


def test_smollm2_says_the_same_by_its_graphs(smol_bundle: Path) -> None:
    pair = paceline.load(smol_bundle), paceline.load(smol_bundle, sampler="graph")
    for sampling in (SamplingParams(), SamplingParams(0.8, top_p=0.95, seed=5), SamplingParams(1.0, top_k=40, seed=6)):
        ours, theirs = both(pair, "The capital of France is", sampling, num_draft_tokens=3, max_new_tokens=24)
        assert ours == theirs


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("no_repeat_ngram_size", {"sampling": SamplingParams(no_repeat_ngram_size=2)}),
        ("no_repeat_ngram_size", {"draft_sampling": SamplingParams(no_repeat_ngram_size=2)}),
        ("constraint", {"constraint": lambda tokens: None}),
        ("logprobs", {"logprobs": 0}),
        ("drafter", {"drafter": ScriptedDrafter([])}),
    ],
)
def test_what_needs_the_host_is_refused_before_the_first_token(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], argument: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{argument} needs .*sampler='numpy'"):
        decoders[1].generate(PROMPT, **options)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_logits_that_are_no_distribution_are_named(
    tiny_bundle: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = paceline.load(tiny_bundle, sampler="graph")
    model: Any = getattr(decoder, which)
    run = type(model)._run

    def broken(self: Any, ids: Any, cache: Any, num_logits: int, **options: bool) -> Any:
        logits = run(self, ids, cache, num_logits, **options)
        if self is model and cache.length > 10:
            logits[-1, 3] = np.nan
        return logits

    monkeypatch.setattr(type(model), "_run", broken)
    with pytest.raises(ModelOutputError, match=f"^The {which} model's logits for position 1"):
        list(decoder.generate([1, 2, 3], SamplingParams(1.0, seed=1), num_draft_tokens=1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0, typical_p=1e-46),
        SamplingParams(1.0, top_p=1e-46),
        SamplingParams(1.0, min_p=1e-46),
        SamplingParams(1.0, top_k=2**63),
        SamplingParams(1e46),
        SamplingParams(1.0, logit_bias={5: -1e39}),
        SamplingParams(1.0, logit_bias={5: 1e-46}),
    ],
)
def test_what_float32_cannot_tell_apart_keeps_its_meaning(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], sampling: SamplingParams
) -> None:
    with np.errstate(over="ignore"):  # numpy's bias of -1e39
        ours, theirs = both(decoders, PROMPT, replace(sampling, seed=4), max_new_tokens=20, num_draft_tokens=2)
    assert ours == theirs


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e[+]39, .* holds 1.18e-38 to 3.4e[+]38; use"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty is 1e-46, .* holds 1.18e-38 to 3.4e[+]38; use"),
        ({"logit_bias": {5: 1e39}}, "logit_bias is 1e[+]39 for id 5, .* holds up to 3.4e[+]38; use"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_float32_cannot_hold_is_refused_before_the_first_token(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], sampling: dict[str, Any], said: str, temperature: float
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        decoders[1].generate(PROMPT, SamplingParams(temperature, **sampling))
    with pytest.raises(InvalidInputError, match=said):
        decoders[1].generate(PROMPT, draft_sampling=SamplingParams(**sampling))


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_left_is_said_as_numpy_says_it(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], temperature: float, num_draft_tokens: int
) -> None:
    everything = range(decoders[0].vocab_size)
    banned = SamplingParams(temperature, banned_token_ids=tuple(everything))
    ends = SamplingParams(temperature, min_new_tokens=2)
    for decoder in decoders:
        for sampling, stops in ((banned, ()), (ends, everything)):
            with pytest.raises(NoTokenLeftError, match=r"^No token is left at position 3: "):
                list(
                    decoder.generate(
                        [1, 2, 3], sampling, num_draft_tokens=num_draft_tokens, stop_token_ids=tuple(stops)
                    )
                )


@pytest.mark.parametrize(
    ("draft_sampling", "stops"),
    [
        (SamplingParams(1.0, banned_token_ids=tuple(range(262))), ()),
        (SamplingParams(min_new_tokens=5), range(262)),
        (SamplingParams(1.0, forced_token_ids=(10, 12), min_new_tokens=2), (12,)),
    ],
)
def test_where_the_draft_model_has_no_token_left_the_draft_ends(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], draft_sampling: SamplingParams, stops: Sequence[int]
) -> None:
    options = {"draft_sampling": draft_sampling, "stop_token_ids": tuple(stops), "max_new_tokens": 12}
    ours, theirs = both(decoders, PROMPT, SamplingParams(1.0, seed=1), **{"num_draft_tokens": 3, **options})
    assert ours == theirs


def test_penalties_that_overflow_are_said_as_numpy_says_them(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder],
) -> None:
    largest = dict.fromkeys(range(decoders[0].vocab_size), 3.4e38)
    sampling = SamplingParams(1.0, repetition_penalty=1.2e-38, logit_bias=largest)
    for decoder in decoders:
        with pytest.raises(InvalidInputError, match="position 40 become inf by penalties and logit_bias"):
            list(decoder.generate(range(40), sampling, num_draft_tokens=0))


def test_an_unknown_sampler_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(InvalidInputError, match="sampler must be 'numpy' or 'graph', got 'torch'"):
        paceline.load(tiny_bundle, sampler="torch")


def test_a_bundle_from_before_there_were_graphs_is_read_but_not_sampled_by_them(damaged: Path) -> None:
    manifest = json.loads((damaged / MANIFEST_NAME).read_text())
    del manifest["sampler"]
    (damaged / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert list(paceline.load(damaged).generate(PROMPT, max_new_tokens=2))
    with pytest.raises(BundleError, match="has no sampler graphs; export it again"):
        paceline.load(damaged, sampler="graph")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 3}, "sampler.width is 3, but 262 ids in whole blocks of 512 take 512"),
        ({"width": 1024}, "sampler.width is 1024"),
        ({"width": 10**15}, "sampler.width is 10{15}"),
        ({"graphs": {"token": "sampler/none.onnx"}}, "sampler/none.onnx"),
    ],
)
def test_a_manifest_that_contradicts_itself_about_the_graphs_is_refused(
    damaged: Path, change: dict[str, Any], said: str
) -> None:
    manifest = json.loads((damaged / MANIFEST_NAME).read_text())
    manifest["sampler"] |= change
    (damaged / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said):
        paceline.load(damaged)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"graphs": {}}, "lacks the sampler graphs block, deterministic, draft, greedy, greedy_draft, token"),
        ({"block": None}, "lacks the sampler graphs block; export"),
        ({"greedy_draft": None}, "lacks the sampler graphs greedy_draft; export"),
        (
            {"token": "sampler/draft.onnx", "draft": "sampler/token.onnx"},
            r"sampler/draft.onnx is not the sampler's 'token' graph: the inputs accept_uniforms, .*Export the",
        ),
        ({"token": "sampler/block.onnx"}, "sampler/block.onnx is not the sampler's 'token' graph"),
        ({"block": "target/model.onnx"}, "target/model.onnx is not the sampler's 'block' graph"),
    ],
)
def test_graphs_that_are_missing_or_swapped_are_refused_when_they_are_loaded(
    damaged: Path, change: dict[str, Any], said: str
) -> None:
    manifest = json.loads((damaged / MANIFEST_NAME).read_text())
    graphs = change.get("graphs", manifest["sampler"]["graphs"] | change)
    manifest["sampler"]["graphs"] = {name: path for name, path in graphs.items() if path}
    (damaged / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said):
        paceline.load(damaged, sampler="graph")


def test_a_graph_of_another_width_is_refused_when_it_is_loaded(damaged: Path) -> None:
    path = "sampler/greedy.onnx"
    (damaged / path).write_bytes(greedy_verifier(600, 600).SerializeToString())
    manifest = json.loads((damaged / MANIFEST_NAME).read_text())
    manifest["files"][path]["size"] = (damaged / path).stat().st_size
    (damaged / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="the inputs bias, logits, new_counts, prompt_counts are others"):
        paceline.load(damaged, sampler="graph")


def test_what_onnx_runtime_cannot_run_is_said_with_the_graph(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder],
) -> None:
    graphs = decoders[1].graphs
    assert graphs
    inputs = GraphInputs(SamplingParams(), prompt=[0], vocab_size=graphs.vocab_size, width=graphs.width)
    with pytest.raises(BundleError, match=r"^ONNX Runtime cannot run the sampler's 'greedy' graph: "):
        graphs.bound("greedy", inputs).run()  # without logits


def test_biases_of_rows_follow_the_position() -> None:
    params = SamplingParams(1.0, forced_token_ids=(2,), min_new_tokens=2, banned_token_ids=(4,))
    inputs = GraphInputs(params, prompt=[0, 1], vocab_size=5, width=8, end_token_ids=frozenset({3}))
    rows = inputs.bias(position=2, rows=3)
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in rows] == [
        [2],
        [0, 1, 2, 5, 6, 7],
        [0, 1, 2, 3, 5, 6, 7],
    ]
    assert inputs.bias(position=4, rows=3).shape == (1, 8)
    inputs.move([0, 1, 2, 2])
    assert inputs.new_counts.tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    assert inputs.prompt_counts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_the_graphs_draft_with_a_drafter_of_their_own(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder],
) -> None:
    makers = [decoder.generate(PROMPT, num_draft_tokens=3)._new_drafter for decoder in decoders]
    kinds = [type(maker()).__name__ for maker in makers if maker]
    assert kinds == [DraftModelDrafter.__name__, "GraphDrafter"]
