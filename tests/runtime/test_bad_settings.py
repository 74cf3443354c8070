"""Settings and masks that cannot be honoured: each error names the field, the value and the range, or the position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.errors import InvalidInputError, ModelOutputError, NoTokenLeftError
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams, distribution
from paceline.testing import ScriptedDrafter, TableModel

from .law_cases import RULES
from .reference import bitmask

VOCAB = 5
PROMPT = [1, 2]

RANGES: dict[str, tuple[str, list[Any]]] = {
    "temperature": ("a finite number of at least 0", [-0.1, -math.inf, math.inf, math.nan, "1", None, True]),
    "top_k": ("an integer of at least 0", [-1, 1.0, True, None]),
    "top_p": ("above 0 and at most 1", [0, -0.5, 1.0001, math.nan, "0.9", True]),
    "min_p": ("from 0 .* to 1", [-0.001, 1.001, math.nan, None, True]),
    "typical_p": ("above 0 and at most 1", [0, 1.5, math.nan, None]),
    "repetition_penalty": ("a finite number above 0", [0, -1.0, math.inf, math.nan, None, True]),
    "presence_penalty": ("from -2 to 2", [-2.001, 2.001, math.nan, "1", None]),
    "frequency_penalty": ("from -2 to 2", [-2.001, 2.001, math.inf, None]),
    "no_repeat_ngram_size": ("an integer of at least 0", [-1, 2.0, None, True]),
    "min_new_tokens": ("an integer of at least 0", [-1, 1.5, None, True]),
    "seed": (r"None or an integer from 0 to 2\*\*64 - 1", [-1, 2**64, 0.5, True]),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, (_, values) in RANGES.items() for value in values]
)
def test_a_value_out_of_its_range_is_refused_by_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field} must be {RANGES[field][0]}.*got {value!r}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {0: math.nan}, "must map token ids to finite numbers, got nan for id 0"),
        ("logit_bias", {0: math.inf}, ".* got inf for id 0"),
        ("logit_bias", {-1: 1.0}, ".* got 1.0 for id -1"),
        ("logit_bias", {0: "1"}, ".* got '1' for id 0"),
        ("logit_bias", {0: True}, ".* got True for id 0"),
        ("logit_bias", {"0": 1.0}, "must map token ids to finite numbers, got {'0': 1.0}"),
        ("logit_bias", 3, "must map token ids to finite numbers, got 3"),
        ("logit_bias", [1, 2], r"must map token ids to finite numbers, got \[1, 2\]"),
        ("banned_token_ids", (1, -2), "must be token ids of at least 0, got -2"),
        ("banned_token_ids", 3, "must be integer token ids, got 3"),
        ("banned_token_ids", (1.0,), r"must be integer token ids, got \(1.0,\)"),
        ("forced_token_ids", (1, -2), "must be token ids of at least 0, got -2"),
        ("forced_token_ids", "12", "must be integer token ids, got '12'"),
    ],
)
def test_bad_ids_and_biases_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field} {message}"):
        SamplingParams(**{field: value})


def test_an_id_cannot_be_banned_and_forced() -> None:
    with pytest.raises(InvalidInputError, match=r"^Token id 4 is both in banned_token_ids and in forced_token_ids"):
        SamplingParams(banned_token_ids=(1, 4), forced_token_ids=(2, 4))


def generate(sampling: SamplingParams, **arguments: Any) -> list[int]:
    target = TableModel.random(VOCAB, seed=1)
    draft = TableModel.random(VOCAB, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB, arguments.pop("eos", ()))
    generation = decoder.generate(PROMPT, sampling, **{"max_new_tokens": 8, **arguments})
    return [token for step in generation for token in step.token_ids]


@pytest.mark.parametrize("field", ["logit_bias", "banned_token_ids", "forced_token_ids"])
@pytest.mark.parametrize("of", ["sampling", "draft_sampling"])
def test_an_unknown_id_is_refused_at_the_call_with_its_place(field: str, of: str) -> None:
    value: Any = {0: 1.0, VOCAB: 1.0} if field == "logit_bias" else (0, VOCAB)
    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2), None, VOCAB)
    settings: dict[str, Any] = {"sampling": SamplingParams(1.0), of: SamplingParams(1.0, **{field: value})}
    prefix = "draft_sampling: " if of == "draft_sampling" else ""
    with pytest.raises(InvalidInputError, match=f"^{prefix}{field} holds id 5 at position 1, outside .* 5 ids .0 to 4"):
        decoder.generate(PROMPT, **settings)


@pytest.mark.parametrize(
    ("params", "arguments", "message"),
    [
        ({"min_new_tokens": 9}, {}, "min_new_tokens asks for 9 new tokens, but max_new_tokens is 8"),
        ({"forced_token_ids": (1,) * 9}, {}, "forced_token_ids asks for 9 new tokens, but max_new_tokens is 8"),
        (
            {"forced_token_ids": (1, 3), "min_new_tokens": 2},
            {"eos": (3,)},
            "forced_token_ids ends the text before min_new_tokens=2",
        ),
        (
            {"forced_token_ids": (1, 3), "min_new_tokens": 2},
            {"stop_token_ids": [3]},
            "forced_token_ids ends the text before min_new_tokens=2",
        ),
        ({}, {"verification": "typical"}, "verification must be one of 'token', 'block', got 'typical'"),
        ({}, {"verification": None}, "verification must be one of 'token', 'block', got None"),
        ({}, {"constraint": 3}, "constraint must be a function .* got 3"),
        ({}, {"logprobs": -1}, "logprobs must be None or an integer from 0 to 5, got -1"),
        ({}, {"logprobs": 6}, "logprobs must be None or an integer from 0 to 5, got 6"),
        ({}, {"logprobs": True}, "logprobs must be None or an integer from 0 to 5, got True"),
    ],
)
def test_what_contradicts_or_is_unknown_is_refused_at_the_call(
    params: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    decoder = SpeculativeDecoder(
        TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2), None, VOCAB, arguments.pop("eos", ())
    )
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        decoder.generate(PROMPT, SamplingParams(1.0, **params), **{"max_new_tokens": 8, **arguments})


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros(1, np.uint32), "allows no id; a constraint must leave at least one"),
        (np.full(1, 1 << 5, np.uint32), "allows no id"),  # only padding bits
        (np.ones(VOCAB, np.bool_), r"must be a numpy array of uint32 or int32, got bool \(5,\)"),
        (np.ones(1, np.uint64), r"must be a numpy array of uint32 or int32, got uint64 \(1,\)"),
        (np.ones(1, np.float32), r".* got float32 \(1,\)"),
        ([1], r"must be a numpy array of uint32 or int32, got \[1\]"),
        (np.zeros(0, np.uint32), r"has shape \(0,\); expected \(1,\), one bit for each of 5 ids"),
        (np.ones((1, 1), np.uint32), r"has shape \(1, 1\); expected \(1,\)"),
    ],
)
@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_a_mask_that_is_none_is_refused_with_its_place(mask: Any, message: str, num_draft_tokens: int) -> None:
    def constraint(new: Any) -> Any:
        return mask if len(new) == 3 else None

    with pytest.raises(InvalidInputError, match=f"^The constraint's mask behind 3 new tokens {message}"):
        generate(SamplingParams(1.0, seed=1), constraint=constraint, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, ">u4", "<i4"])
def test_masks_may_be_signed_longer_and_of_any_byte_order(dtype: Any) -> None:
    words = np.array([0b00010, 7]).astype(dtype)
    assert generate(SamplingParams(1.0, seed=1), constraint=lambda new: words) == [1] * 8


def test_where_a_constraint_is_complete_before_the_least_length_that_is_named() -> None:
    with pytest.raises(NoTokenLeftError, match="min_new_tokens=4 allows no end yet: the text has 2") as raised:
        generate(
            SamplingParams(min_new_tokens=4),
            constraint=lambda new: bitmask({4}, VOCAB) if len(new) == 2 else None,
            eos=(4,),
        )
    assert raised.value.argument == "min_new_tokens"


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
@pytest.mark.parametrize("max_new_tokens", [3, 4, 8])
def test_where_nothing_is_left_the_error_names_the_position(
    sampling: SamplingParams, num_draft_tokens: int, max_new_tokens: int
) -> None:
    banned = SamplingParams(sampling.temperature, banned_token_ids=(0, 4), seed=sampling.seed)
    with pytest.raises(NoTokenLeftError, match=r"^No token is left at position 4: banned"):
        generate(
            banned,
            constraint=lambda new: bitmask({0, 4}, VOCAB) if len(new) == 2 else None,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
        )


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 8])
def test_a_forced_id_that_the_constraint_forbids_is_never_emitted(num_draft_tokens: int, max_new_tokens: int) -> None:
    with pytest.raises(NoTokenLeftError, match="position 2"):
        generate(
            SamplingParams(1.0, seed=1, forced_token_ids=(3,)),
            constraint=lambda new: bitmask({0, 1}, VOCAB),
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
        )


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
def test_behind_an_end_token_nothing_is_refused(sampling: SamplingParams, rule: str, num_draft_tokens: int) -> None:
    # Three ids, none of which may come twice: plain decoding ends at the end token and never looks further.
    target = TableModel([[0, 90, 0], [0, 0, 90], [90, 0, 0]])
    decoder = SpeculativeDecoder(target, target, None, 3, (2,))
    unique = SamplingParams(sampling.temperature, no_repeat_ngram_size=1, seed=1)
    for drafter in (None, ScriptedDrafter([0, 1, 2, 0, 1, 2])):
        generation = decoder.generate(
            [0], unique, num_draft_tokens=num_draft_tokens, drafter=drafter if num_draft_tokens else None
        )
        assert [token for step in generation for token in step.token_ids] == [1, 2]
        assert generation.finish_reason == "stop"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("params", "logits", "becomes"),
    [
        ({"repetition_penalty": 1e300}, [0.0, 1e38, 1.0], {"float32": "nan"}),
        ({"repetition_penalty": 1e-300}, [1.0, 1e38, 1.0], {"float32": "inf", "float64": "inf"}),
        ({"repetition_penalty": 1e-39}, [0.0, 1.0, 1.0], {"float32": "nan|inf"}),
        ({"logit_bias": {0: 1e39}}, [0.0, 1.0, 1.0], {"float32": "inf"}),
        ({"logit_bias": {0: 1e308}}, [1e308, 1.0, 1.0], {"float64": "inf"}),
        ({"logit_bias": {0: 3e38}}, [3e38, 1.0, 1.0], {"float32": "inf"}),
    ],
)
def test_penalties_and_biases_that_overflow_are_refused_with_the_position(
    params: dict[str, Any], logits: list[float], becomes: dict[str, str], dtype: Any
) -> None:
    sampler = RowSampler(SamplingParams(1.0, **params), vocab_size=3, num_prompt_tokens=1)
    with np.errstate(over="ignore"):
        row = np.array(logits).astype(dtype)
    if not np.isfinite(row).all():
        return  # no such logits in this precision
    if (found := becomes.get(np.dtype(dtype).name)) is None:
        assert np.isfinite(sampler.distribution(row, [0, 1, 0], [])).all()
        return
    with pytest.raises(InvalidInputError, match=f"target model's logits for position 3 become ({found}) by penalties"):
        sampler.distribution(row, [0, 1, 0], [])
    with pytest.raises(InvalidInputError, match="position 3 become"):
        sampler.greedy_token(row, [0, 1], [0])


def test_a_bias_below_all_numbers_is_a_ban() -> None:
    sampler = RowSampler(SamplingParams(1.0, logit_bias={0: -1e39}), vocab_size=3, num_prompt_tokens=1)
    assert sampler.distribution(np.zeros(3, np.float32), [0], []).tolist() == [0, 0.5, 0.5]


def test_what_was_wrong_before_penalties_is_the_models_fault() -> None:
    sampler = RowSampler(SamplingParams(1.0, presence_penalty=1.0), vocab_size=3, num_prompt_tokens=1)
    for bad in (math.nan, math.inf, -math.inf):
        row: FloatArray = np.full(3, bad, np.float32)
        with pytest.raises(ModelOutputError, match="draft model's logits for position 2 contain"):
            sampler.distribution(row, [0, 1], [], "draft")


@pytest.mark.parametrize("temperature", [1e30, 1e46, 1e300, 1.7e308])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_huge_temperature_is_flat_over_what_is_allowed(temperature: float, dtype: Any) -> None:
    logits = np.array([3.0, -math.inf, -2.0], dtype=dtype)
    assert distribution(logits, SamplingParams(temperature)).tolist() == [0.5, 0, 0.5]
