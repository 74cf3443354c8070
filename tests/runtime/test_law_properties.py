"""The law, the cuts, the history and the draw for whatever hypothesis thinks of, against naive counterparts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.constraint import ConstraintMasks
from paceline.history import History
from paceline.row_sampler import RowSampler
from paceline.sampling import SamplingParams, distribution, greedy_token, sample
from paceline.testing import ScriptedDrafter, TableModel

from .law_cases import ReducedTable, TableDrafter, law_of
from .reference import Setting, constraint_of, naive_cuts, naive_logits, reference_law, total_variation

# Ties are common, and logits that differ give probabilities that differ.
finite_logits = st.one_of(st.integers(-4, 4).map(float), st.integers(-240, 240).map(lambda n: n / 8))
logits_lists = st.one_of(
    st.lists(st.one_of(finite_logits, st.just(-math.inf)), min_size=1, max_size=40),
    st.lists(st.integers(-16, 16).map(lambda n: n / 8), min_size=2, max_size=9),  # flat: a cut may keep all
).filter(lambda values: any(map(math.isfinite, values)))


def shares(least: float) -> st.SearchStrategy[float]:
    # A cut near 1 runs and keeps all: whoever comes after it may see another order.
    return st.one_of(st.just(1.0), st.floats(least, 0.999), st.sampled_from([0.9, 0.99999, 0.99999]))


cuts = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 1.0, 0.9, 2.5, 0.0, 1e-6, 0.3, 1e3]),
        "top_k": st.sampled_from([0, 0, 0, 45, 1, 2, 3, 7]),
        "top_p": shares(0.01),
        "min_p": st.one_of(st.sampled_from([0.0, 0.0, 1e-4]), st.floats(0, 1)),
        "typical_p": shares(0.01),
    }
)


def ids(vocab: int) -> st.SearchStrategy[int]:
    return st.integers(0, vocab - 1)


@st.composite
def params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    penalties: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {
                "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 1.3, 3.0]),
                "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.7, 2.0]),
                "frequency_penalty": st.sampled_from([0.0, 0.0, 0.8, -2.0]),
                "no_repeat_ngram_size": st.sampled_from([0, 0, 3, 4]),
                "min_new_tokens": st.sampled_from([0, 0, 1, 2]),
                "logit_bias": st.dictionaries(ids(vocab), st.sampled_from([-3.0, 0.25, 2.0]), max_size=2),
                "banned_token_ids": st.lists(ids(vocab), max_size=1).map(tuple),
                "forced_token_ids": st.lists(ids(vocab), max_size=2).map(tuple),
            }
        )
    )
    assume(not set(penalties["banned_token_ids"]) & set(penalties["forced_token_ids"]))
    cutting: dict[str, Any] = draw(cuts)
    return SamplingParams(**cutting, **penalties)


@st.composite
def setting_of(draw: st.DrawFn, vocab: int) -> Setting:
    """With masks that depend on the last new token and on how many there are."""
    masks = draw(
        st.lists(st.one_of(st.none(), st.sets(ids(vocab), min_size=1, max_size=vocab)), min_size=3, max_size=3)
    )
    allowed = draw(st.sampled_from([None, lambda new: masks[(sum(new) + len(new)) % 3]]))
    return Setting(draw(params(vocab)), draw(st.frozensets(ids(vocab), max_size=1)), allowed)


@st.composite
def drafts_of(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["model", "own settings", "script", "own drafter", "reduced", "narrower"]))
    model = TableModel.random(vocab, seed=draw(st.integers(0, 99)), scale=draw(st.sampled_from([0.5, 2.0])), dtype="f8")
    if kind == "own settings":
        return {"draft": model, "draft_sampling": draw(params(vocab))}
    if kind == "script":
        script = draw(st.lists(ids(vocab), min_size=7, max_size=7))
        return {"new_drafter": lambda: ScriptedDrafter(script)}
    if kind == "own drafter":
        fixed, stops = draw(st.tuples(st.sets(ids(vocab)), st.sets(ids(vocab), max_size=1)))
        own = SamplingParams(1.3, min_p=0.1)
        return {
            "new_drafter": lambda: TableDrafter(
                model, own, fixed=lambda text: text[-1] in fixed, stops=lambda text: text[-1] in stops
            )
        }
    if kind == "reduced":
        logit_ids = draw(st.lists(ids(vocab), min_size=1, max_size=vocab, unique=True))
        return {"draft": ReducedTable(model, logit_ids)}
    return {"draft": TableModel.random(vocab - 1, seed=5, dtype="f8") if kind == "narrower" else model}


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_the_law_is_the_targets_whatever_is_asked(data: st.DataObject) -> None:
    vocab, num_draft_tokens = data.draw(st.sampled_from([(3, 1), (3, 2), (4, 2), (5, 1)]))
    setting, drafts = data.draw(setting_of(vocab)), data.draw(drafts_of(vocab))
    prompt = data.draw(st.lists(ids(vocab), min_size=1, max_size=4))
    # Logits of a few levels: ties, and rows that agree with the draft's.
    table = data.draw(st.lists(finite_logits, min_size=vocab**2, max_size=vocab**2))
    target = TableModel(np.reshape(table, (vocab, vocab)) / 4, dtype=np.float64)
    num_tokens = data.draw(st.integers(1, num_draft_tokens + 1))
    try:
        expected, margin = reference_law(target, prompt, num_tokens, setting)
    except AssertionError:  # nothing is left behind some text
        assume(False)
    assume(margin > 1e-9)
    for rule in ("token", "block"):
        law = law_of(target, num_tokens, setting, prompt=prompt, num_draft_tokens=num_draft_tokens, rule=rule, **drafts)
        assert total_variation(law, expected) < 1e-9


@given(logits=logits_lists, knobs=cuts)
@settings(max_examples=1000, deadline=None)
def test_the_cuts_equal_naive_ones(logits: list[float], knobs: dict[str, Any]) -> None:
    expected, margin = naive_cuts(logits, SamplingParams(**knobs))
    assume(margin > 1e-9)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        if dtype is np.float32 and margin < 1e-4:
            continue
        probs = distribution(np.array(logits, dtype=dtype), SamplingParams(**knobs))
        assert probs.dtype == dtype
        np.testing.assert_allclose(probs, expected, atol=tolerance)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_row_equals_the_naive_row_of_its_text(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 40))
    setting = data.draw(setting_of(vocab))
    prompt, new = (data.draw(st.lists(ids(vocab), min_size=least, max_size=12)) for least in (1, 0))
    assume(not setting.ends & set(new))
    logits = data.draw(st.lists(st.one_of(finite_logits, st.just(-math.inf)), min_size=vocab, max_size=vocab))
    expected = naive_logits(logits, prompt, new, setting)
    assume(max(expected) > -math.inf)
    masks = None
    if constraint := constraint_of(setting, vocab):
        masks = ConstraintMasks(constraint, vocab)
    sampler = RowSampler(
        setting.params, vocab_size=vocab, num_prompt_tokens=len(prompt), end_token_ids=setting.ends, masks=masks
    )
    split = data.draw(st.integers(0, len(new)))
    row = np.array(logits)
    text, drafted = [*prompt, *new[:split]], new[split:]
    np.testing.assert_allclose(sampler.adjusted(row, text, drafted), expected, rtol=1e-12, atol=1e-12)
    assert row.tolist() == logits
    assert sampler.greedy_token(row, text, drafted) == greedy_token(np.array(expected))
    # What is forced is what alone is possible.
    if (forced := sampler.forced(text, drafted)) is not None and logits[forced] > -math.inf:
        assert np.flatnonzero(np.array(expected) > -math.inf).tolist() == [forced]


@given(
    num_prompt_tokens=st.integers(0, 4),
    size=st.integers(0, 4),
    moves=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), max_size=4)), max_size=12
    ),
    keeps=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_a_history_counts_what_a_recount_counts(
    num_prompt_tokens: int, size: int, moves: list[tuple[list[int], list[int]]], keeps: bool
) -> None:
    """The text grows, with drafted tokens that come and go, by whole rounds or row by row."""
    history = History(num_prompt_tokens, size)
    text: list[int] = []
    for grown, drafted in moves:
        text += grown
        for end in range(len(drafted) + 1) if keeps else [len(drafted)]:
            history.move(text, drafted[:end])
            whole = text + drafted[:end]
            for counts, tokens in ((history.seen, whole), (history.new, whole[num_prompt_tokens:])):
                found, numbers = counts.arrays()
                assert dict(zip(found.tolist(), numbers.tolist(), strict=True)) == Counter(tokens)
                assert len(found) == len(set(found.tolist()))
            if size:
                grams = [tuple(whole[i : i + size]) for i in range(len(whole) - size + 1)]
                expected = {i for i in range(3) if (*whole, i)[-size:] in grams and len(whole) >= size - 1}
                assert set(history.ngram_completions()) == expected
        if keeps and drafted:
            text += drafted[: len(drafted) // 2]


def test_a_history_grows_beyond_its_first_arrays() -> None:
    history = History(2, 2)
    text = [i * 7 % 401 for i in range(300)]
    for end in range(0, 300, 3):
        history.move(text[:end], text[end : end + 2])
    history.move(text, [])
    found, numbers = history.seen.arrays()
    assert dict(zip(found.tolist(), numbers.tolist(), strict=True)) == Counter(text)


@given(
    weights=st.lists(
        st.one_of(st.sampled_from([0.0, 1e-30, 0.25, 1.0, 3.0]), st.floats(0, 1)), min_size=1, max_size=1300
    ).filter(lambda values: sum(values) > 1e-20),
    uniform=st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
)
@settings(max_examples=300, deadline=None)
def test_a_draw_is_the_inverse_of_the_cumulative_sum(weights: list[float], uniform: float) -> None:
    cumulated = (
        np.array([math.fsum(weights[: i + 1]) for i in range(len(weights))])
        if len(weights) < 200
        else np.cumsum(weights)
    )
    drawn = sample(np.array(weights), uniform)
    below = cumulated[drawn - 1] if drawn else 0.0
    total = cumulated[-1]
    assert weights[drawn] > 0
    assert below - 1e-12 * total <= uniform * total <= cumulated[drawn] + 1e-12 * total
