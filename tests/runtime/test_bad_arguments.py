"""Arguments of any type and size: each is refused with a message, none with an error from inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline
from paceline.decoder import SpeculativeDecoder
from paceline.errors import BundleError, InvalidInputError
from paceline.ort_session import open_session
from paceline.sampling import SamplingParams
from paceline.testing import TableModel
from paceline.verify import Draft

from .law_cases import ReducedTable

HUGE = 10**5000  # more digits than Python turns into text


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {-HUGE: 1.0}},
        {"temperature": 10**400},
        {"repetition_penalty": 10**400},
        {"top_k": -HUGE},
        {"seed": HUGE},
        {"banned_token_ids": (-HUGE,)},
    ],
)
def test_numbers_beyond_all_bounds_are_refused_with_a_message(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verification": []}, "verification must be one of 'token', 'block', got"),
        ({"verification": np.array(["token", "x"])}, "verification must be one of"),
        ({"num_draft_tokens": HUGE}, "num_draft_tokens"),
        ({"max_new_tokens": -HUGE}, "max_new_tokens must be"),
        ({"logprobs": HUGE}, "logprobs must be"),
        ({"request": HUGE}, "request must be"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids holds id"),
        ({"sampling": SamplingParams(banned_token_ids=(HUGE,))}, "banned_token_ids holds id"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be integer token ids, got"),
        ({"stop_token_ids": b"a"}, "stop_token_ids must be integer token ids, got"),
        ({"draft_sampling": SamplingParams(banned_token_ids=(8,))}, "draft_sampling: banned_token_ids holds id 8"),
    ],
)
def test_arguments_of_any_kind_are_refused_with_a_message(arguments: dict[str, Any], message: str) -> None:
    model = TableModel.random(4, seed=1)
    with pytest.raises(InvalidInputError, match=message):
        SpeculativeDecoder(model, model, None, 4).generate([1], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, None, 4), "target must be a model as paceline.CausalLM says, got None"),
        ((TableModel.random(4, seed=1), "draft", None, 4), "draft must be a model"),
        ((ReducedTable(TableModel.random(4, seed=1), [0, 2]), None, None, 2), "target must have a logit for every id"),
        ((TableModel.random(4, seed=1), None, None, "4"), "vocab_size must be an integer, got '4'"),
    ],
)
def test_a_decoder_of_no_models_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SpeculativeDecoder(*arguments)


@pytest.mark.parametrize("probs", [5, (row for row in [np.ones(3)])])
def test_probabilities_that_are_no_rows_are_refused(probs: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a sequence of rows"):
        Draft((1,), probs)


def test_a_bundle_of_no_possible_name_is_refused() -> None:
    with pytest.raises(BundleError, match="There is no bundle at xxx"):
        paceline.load("x" * 5000)
    with pytest.raises(InvalidInputError, match="sampler must be 'numpy' or 'graph'"):
        paceline.load("nowhere", sampler=np.array(["numpy", "x"]))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"Unknown provider \[\]"):
        open_session(b"", provider=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), [True], [1.0], 5, None])
def test_a_prompt_is_a_text_or_ids(prompt: Any) -> None:
    model = TableModel.random(128, seed=1)
    with pytest.raises(InvalidInputError, match="prompt must be text or integer token ids, got"):
        SpeculativeDecoder(model, model, None, 128).generate(prompt)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forced_token_ids": {1, 2}}, "forced_token_ids must be in the text's order"),
        ({"forced_token_ids": [True]}, "forced_token_ids must be integer token ids"),
        ({"banned_token_ids": b"a"}, "banned_token_ids must be integer token ids"),
        ({"logit_bias": {True: 1.0}}, "logit_bias must map token ids to finite numbers"),
        ({"temperature": np.bool_(True)}, "temperature must be a finite number of at least 0, got True"),
        ({"seed": np.float64(1)}, "seed must be None or an integer"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SamplingParams(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    settings: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "seed": np.uint64(2**63),
        "logit_bias": {np.int64(1): np.float32(0.25)},
    }
    given = SamplingParams(**settings)
    assert given == SamplingParams(temperature=0.5, top_k=3, seed=2**63, logit_bias={1: 0.25})
    assert type(given.top_k) is int
    model = TableModel.random(8, seed=1)
    decoder = SpeculativeDecoder(model, model, None, 8)
    kinds: tuple[Any, ...] = (int, np.int64)
    plain, numpy = (
        decoder.generate([1], given, max_new_tokens=kind(5), num_draft_tokens=kind(2), logprobs=kind(1))
        for kind in kinds
    )
    assert [step.token_ids for step in plain] == [step.token_ids for step in numpy]


def test_a_long_value_is_cut_with_a_mark() -> None:
    seed: Any = ["a" * 200]
    with pytest.raises(InvalidInputError, match=r"got \['aaaa.*a…\.$"):
        SamplingParams(seed=seed)
