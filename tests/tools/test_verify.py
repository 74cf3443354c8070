"""`paceline verify`: green for the decoder as it is, red for each way of breaking it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline.verify
from paceline import SamplingParams
from paceline.decoder import DEFAULT_VERIFICATION, SpeculativeDecoder
from paceline.drafters import DraftModelDrafter
from paceline.kv_cache import KVCache
from paceline.rounds import play_round
from paceline.sampling import FloatArray
from paceline.streams import Purpose, Streams
from paceline.testing import TableCache, TableModel
from paceline.verify import Draft, Verdict
from paceline_tools.invariants import TOLERANCES
from paceline_tools.law import draw_sample, findings
from paceline_tools.proof import Proof, prove
from paceline_tools.significance import holm

from .conftest import Invoke, write_table_bundle

PROMPT = ("--prompt", "once")


def document(invoke: Invoke, *args: object, exit_code: int = 0) -> dict[str, Any]:
    result = invoke("verify", *args, "--json")
    assert result.exit_code == exit_code, result.output[-500:]
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    parsed: dict[str, Any] = json.loads(result.stdout)
    assert parsed["passed"] == (exit_code == 0)
    return parsed


def failed(found: dict[str, Any]) -> set[str]:
    """Names of the tests of the law that failed."""
    return {row["name"] for row in found["law"] if not row["passed"]}


KNOBS: list[tuple[object, ...]] = [
    (),
    ("--top-k", 5),
    ("--top-p", 0.8, "--temperature", 0.7),
    ("--min-p", 0.1, "--typical-p", 0.9, "--frequency-penalty", 1, "--presence-penalty", 0.5),
    ("--repetition-penalty", 1.3, "--no-repeat-ngram-size", 2, "--logit-bias", "70:2", "--ban-token-id", 71),
    ("--force-token-id", 70, "--min-new-tokens", 3),
    ("--draft-tokens", 1),
    ("--verification", "token"),
]


@pytest.mark.parametrize("knobs", KNOBS)
def test_the_decoder_as_it_is_passes(invoke: Invoke, table_bundle: Path, knobs: tuple[object, ...]) -> None:
    found = document(invoke, table_bundle, *PROMPT, "--seed", 3, *knobs)
    k = found["settings"]["num_draft_tokens"]
    assert found["reasons"] == []
    acceptance = "acceptance in row {} against 1 - TV" if "token" in knobs else "drafts that stand to row {}"
    assert [row["name"] for row in found["law"]] == [
        "first token, prompt 1",
        "token pairs, prompt 1",
        "token pairs against plain decoding, prompt 1",
        *(acceptance.format(row) for row in range(1, k + 1)),
        *(f"token {row} of a round" for row in range(1, k + 2)),
        "drafted tokens against the draft's own law",
        "tokens that the target never emits",
    ]
    assert found["law"][0]["samples"] == found["settings"]["samples"] == 1000
    assert len(found["greedy"]) == 4
    assert all(text["parts_at"] is None for text in found["greedy"])
    assert all(one["tv"] == 0 for one in found["caches"] + found["rounding"])
    assert found["passes"]["target"] < 1000


def test_the_report_says_what_was_found(invoke: Invoke, table_bundle: Path) -> None:
    result = invoke("verify", table_bundle, "--samples", 100, "--seed", 4)
    assert result.exit_code == 0, result.output
    assert "prompt 3: 'Once upon a time'" in result.stdout
    assert "100 speculative (K = 3) and 100 plain continuations of each prompt, seed 4" in result.stdout
    assert "Greedy texts: 12 of 12 equal" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASSED: nothing tells")
    assert "continuations, prompt 2" in result.stderr


def test_a_fresh_seed_is_told(invoke: Invoke, table_bundle: Path) -> None:
    args = (table_bundle, *PROMPT, "--samples", 100, "--alpha", 1e-9)
    first, second = (document(invoke, *args) for _ in range(2))
    assert first["settings"]["seed"] != second["settings"]["seed"]
    again = document(invoke, *args, "--seed", first["settings"]["seed"])
    assert again["law"] == first["law"]


def test_greedy_decoding_is_tested_without_draws(invoke: Invoke, table_bundle: Path) -> None:
    found = document(invoke, table_bundle, *PROMPT, "--temperature", 0)
    assert found["law"] == []
    assert len(found["caches"]) > 8
    result = invoke("verify", table_bundle, *PROMPT, "--temperature", 0)
    assert "the law was not tested" in result.stdout


def test_a_chat_is_encoded_as_one(invoke: Invoke, table_bundle: Path) -> None:
    document(invoke, table_bundle, "--prompt", "hi", "--chat", "--samples", 100, "--seed", 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--samples", 10), "--samples"),
        (("--draft-tokens", 0), "--draft-tokens"),
        (("--alpha", 0), "--alpha"),
        (("--alpha", "nan"), "'--alpha': got 'nan'"),
        (("--temperature", "nan"), "--temperature must be"),
        (("--temperature", -1), "--temperature must be"),
        (("--top-p", 0), "--top-p must be"),
        (("--seed", -1), "--seed must be"),
        (("--prompt", ""), "empty"),
        (("--prompt", "\udcff"), "not valid UTF-8"),
        (("--logit-bias", "7"), "a token id and a number are expected"),
        (("--ban-token-id", 999), "--ban-token-id holds id 999"),
        (("--prompt", "x" * 62), "62 tokens"),
        (("--draft-tokens", 100_000), "--draft-tokens 100000 need 1000"),
        (("--draft-tokens", 60, "--temperature", 0), "target model's context has 64"),
        (("--min-new-tokens", 41), "--min-new-tokens asks for 41 new tokens, but the texts that are compared have 40"),
        (("--force-token-id", 70) * 41, "--force-token-id asks for 41 new tokens, but the texts that are compared"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    invoke: Invoke, table_bundle: Path, args: tuple[object, ...], message: str
) -> None:
    result = invoke("verify", table_bundle, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "greedy texts" not in result.stderr  # refused before any work
    assert result.stdout == ""


def test_a_small_context_bounds_the_drafts() -> None:
    target, draft = (TableModel.random(6, seed=seed, max_length=5) for seed in (1, 2))
    proof = proof_of(SpeculativeDecoder(target, draft, None, 6), num_draft_tokens=1)
    assert [text.num_draft_tokens for text in proof.greedy] == [1, 2, 3, 4]
    assert proof.reasons == []


def test_no_draft_is_longer_than_a_greedy_text() -> None:
    target, draft = (TableModel.random(6, seed=seed, max_length=100) for seed in (1, 2))
    proof = proof_of(SpeculativeDecoder(target, draft, None, 6), SamplingParams(), num_draft_tokens=90)
    assert max(text.num_draft_tokens for text in proof.greedy) == 39


def test_a_bundle_without_a_draft_is_refused(invoke: Invoke, table_bundle: Path, tmp_path: Path) -> None:
    result = invoke("verify", write_table_bundle(tmp_path / "other", draft=False))
    assert result.exit_code == 2
    assert "no draft model" in result.stderr


# What breaks the decoder, by name. Each is patched in where the round looks it up.
Patch = Callable[[pytest.MonkeyPatch], None]


def swapped_ratio(patch: pytest.MonkeyPatch) -> None:
    acceptance = paceline.verify.acceptance
    patch.setattr(paceline.verify, "acceptance", lambda target_prob, draft_prob: acceptance(draft_prob, target_prob))


def residual_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paceline.verify, "residual", lambda target_row, *args: target_row)


def all_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paceline.verify, "acceptance", lambda target_prob, draft_prob: 1.0)


def draft_noise_for(shared: Purpose) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        uniform = Streams.uniform

        def sharing(self: Streams, position: int, purpose: Purpose, round_start: int = 0) -> float:
            if purpose is shared:  # the number that drew the first drafted token of a round that begins here
                return uniform(self, position, Purpose.DRAFT, position)
            return uniform(self, position, purpose, round_start)

        patch.setattr(Streams, "uniform", sharing)

    return apply


def rows_of_the_target(change: Callable[[Any], Any]) -> Patch:
    """Verify with other rows of logits than the target's pass brought, whenever there is a draft."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module = sys.modules[play_round.__module__]
        verify = module.__dict__["verify"]

        def wrong_rows(draft: Draft, logits: Any, *args: Any) -> Verdict:
            found: Verdict = verify(draft, change(logits) if draft.tokens else logits, *args)
            return found

        patch.setattr(module, "verify", wrong_rows)

    return apply


def claims(change: Callable[[Draft], Draft]) -> Patch:
    """Submit something else than what was drafted and what it was drawn from."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        propose = DraftModelDrafter.propose
        patch.setattr(DraftModelDrafter, "propose", lambda self, *args: change(propose(self, *args)))

    return apply


def rows_of(draft: Draft) -> list[FloatArray]:
    return [row for row in draft.probs or () if row is not None]


def sharpened(draft: Draft) -> Draft:
    """The claim of another temperature than the one that was drawn at."""
    rows = [row**1.5 / (row**1.5).sum() for row in rows_of(draft)]
    return Draft(draft.tokens, rows or None)


def greedy_but_scored_as_drawn(draft: Draft) -> Draft:
    rows = rows_of(draft)
    return Draft(tuple(int(row.argmax()) for row in rows), rows) if rows else draft


def drawn_but_scored_as_deterministic(draft: Draft) -> Draft:
    return Draft(draft.tokens, [None] * len(draft.tokens))


def block_with_the_residual_of_tokens(patch: pytest.MonkeyPatch) -> None:
    residual = paceline.verify.residual

    def of_tokens(target_row: FloatArray, draft_row: FloatArray, token: int, scale: float = 1.0) -> FloatArray:
        return residual(target_row, draft_row, token)

    patch.setattr(paceline.verify, "residual", of_tokens)


def block_that_does_not_look_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paceline.verify, "_block_acceptance", lambda scale, over: scale)


BREAKS_THE_LAW: dict[str, Patch] = {
    "target and draft swapped in the ratio": swapped_ratio,
    "residual dropped": residual_dropped,
    "all accepted": all_accepted,
    "the draft's noise draws the recovered token": draft_noise_for(Purpose.RECOVER),
    "the draft's noise decides acceptance": draft_noise_for(Purpose.ACCEPT),
    "bonus row off by one": rows_of_the_target(lambda logits: np.concatenate((logits[:-1], logits[-2:-1]))),
    "all rows off by one": rows_of_the_target(lambda logits: np.roll(logits, 1, axis=0)),
    "a temperature for drafted rows alone": rows_of_the_target(lambda logits: logits * 1.5),
    "a penalty on the last row alone": rows_of_the_target(
        lambda logits: np.concatenate((logits[:-1], np.where(logits[-1:] > 0, logits[-1:] / 9, logits[-1:] * 9)))
    ),
    "the draft claims another temperature": claims(sharpened),
    "the draft is greedy but scored as drawn": claims(greedy_but_scored_as_drawn),
    "the draft is drawn but scored as deterministic": claims(drawn_but_scored_as_deterministic),
}


@pytest.mark.parametrize("name", BREAKS_THE_LAW)
def test_a_broken_rule_fails(invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    BREAKS_THE_LAW[name](monkeypatch)
    for k in (1, 3):
        samples = 4000 if k == 3 and "last row" in name else 1000  # a row that one round in ten gets to
        args = (*PROMPT, "--verification", "token", "--draft-tokens", k, "--samples", samples, "--seed", 5)
        found = document(invoke, table_bundle, *args, exit_code=1)
        print(f"\n{name}, K = {k}: {sorted(failed(found))}")
        assert failed(found)


@pytest.mark.parametrize("broken", [block_that_does_not_look_ahead, residual_dropped])
def test_a_broken_block_rule_fails(
    invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch, broken: Patch
) -> None:
    broken(monkeypatch)
    args = (*PROMPT, "--draft-tokens", 2, "--verification", "block", "--samples", 2000, "--seed", 5)
    found = document(invoke, table_bundle, *args, exit_code=1)
    print(f"\n{broken.__name__}: {sorted(failed(found))}")
    assert failed(found)


def test_a_small_bias_takes_more_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Total variation over the first three tokens, by enumeration: 0.025."""
    target, draft = (TableModel.random(3, seed=seed) for seed in (36, 136))
    decoder = SpeculativeDecoder(target, draft, None, 3)
    block_with_the_residual_of_tokens(monkeypatch)
    sample = draw_sample(
        decoder,
        "",
        [1, 2],
        SamplingParams(temperature=1.0),
        num_draft_tokens=2,
        verification="block",
        samples=6000,
        seed=5,
    )
    assert min(holm([finding.p_value for finding in findings([sample])])) < 1e-3


def test_the_reasons_are_printed(invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    residual_dropped(monkeypatch)
    result = invoke("verify", table_bundle, *PROMPT, "--seed", 5)
    assert result.exit_code == 1
    verdict = result.stdout.partition("\nFAILED:\n")[2]
    assert "first token, prompt 1: 0." in verdict
    assert "where chance alone makes" in verdict


def test_a_wrong_greedy_rule_fails(invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts_one(tokens: tuple[int, ...], target_token: Callable[[int], int]) -> Verdict:
        return Verdict(min(len(tokens), 1), target_token(min(len(tokens), 1)))

    monkeypatch.setattr(paceline.verify, "verify_greedy", accepts_one)
    found = document(invoke, table_bundle, *PROMPT, "--seed", 5, exit_code=1)
    assert not failed(found)
    assert all("parts from plain decoding's" in reason for reason in found["reasons"])
    assert len(found["reasons"]) == 4


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_cache_that_does_not_forget_fails(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Off by one: the rejected token stays in the context of those behind it, instead of the one that replaced it."""
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(6, seed=2), None, 6)
    broken = getattr(decoder, model)

    def rollback(self: TableCache, length: int) -> None:
        stale = self.tokens[length:]
        KVCache.rollback(self, length)
        del self.tokens[length:]
        if stale and self in broken.live_caches:
            self.tokens[-1:] = stale[:1]

    assert proof_of(decoder, sampling=SamplingParams()).reasons == []
    monkeypatch.setattr(TableCache, "rollback", rollback)
    assert any("live KV cache" in reason for reason in proof_of(decoder, sampling=SamplingParams()).reasons)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_exact_decoders_seldom_fail(verification: str) -> None:
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(6, seed=2), None, 6)
    p_values = []
    for seed in range(30):
        sample = draw_sample(
            decoder,
            "",
            [1, 2],
            SamplingParams(temperature=1.0),
            num_draft_tokens=2,
            verification=verification,
            samples=200,
            seed=seed,
        )
        p_values.append([finding.p_value for finding in findings([sample])])
    found = np.array(p_values)
    assert found.min() * found.shape[1] > 1e-4
    # Of p values that are near-uniform one in twenty lies below 0.05.
    assert 0.005 < (found < 0.05).mean() < 0.1
    assert (found < 0.5).mean() > 0.3


def proof_of(
    decoder: SpeculativeDecoder,
    sampling: SamplingParams = SamplingParams(temperature=1.0, seed=2),  # noqa: B008 - frozen
    *,
    prompt: Sequence[int] = (1, 2),
    num_draft_tokens: int = 2,
    verification: str = DEFAULT_VERIFICATION,
    samples: int = 300,
) -> Proof:
    return prove(
        decoder,
        {"it": prompt},
        sampling,
        num_draft_tokens=num_draft_tokens,
        verification=verification,
        samples=samples,
        alpha=1e-3,
        tolerance=TOLERANCES["fp32"],
    )


# With an end token, 7, whose row in a round's pass nothing adjusts any more.
WITH_AN_END: dict[str, dict[str, Any]] = {
    "biased": {"logit_bias": {7: 2.0}},
    "others banned": {"logit_bias": {7: 2.0}, "banned_token_ids": (1, 2)},
    "forced": {"forced_token_ids": (7, 2, 3)},
    "forced later": {"forced_token_ids": (2, 7, 3)},
    "no repeats": {"no_repeat_ngram_size": 1},
}


def with_an_end() -> SpeculativeDecoder:
    target, draft = (TableModel.random(12, seed=seed, max_length=256) for seed in (1, 2))
    return SpeculativeDecoder(target, draft, None, 12, (7,))


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", WITH_AN_END)
def test_nothing_behind_an_end_token_is_tested(name: str, verification: str) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1, **WITH_AN_END[name])
    proof = proof_of(with_an_end(), sampling, num_draft_tokens=3, verification=verification, samples=1000)
    assert proof.reasons == []


@pytest.mark.parametrize("verification", ["token", "block"])
def test_texts_that_end_are_counted(verification: str) -> None:
    sampling = SamplingParams(temperature=1.0, logit_bias={7: 2.0})
    sample = draw_sample(
        with_an_end(), "", [1, 2], sampling, num_draft_tokens=3, verification=verification, samples=500, seed=1
    )
    assert sample.first[7] > 0
    for pairs in (sample.pairs, sample.plain_pairs, sample.expected_pairs):
        assert [pair for pair in pairs if pair[0] == 7] == [(7, None)]
        assert all(second is not None for first, second in pairs if first != 7)
    assert sample.pairs[7, None] == sample.first[7]
    assert sample.expected_pairs[7, None] == sample.expected_first[7]


def test_a_draft_that_goes_on_behind_an_end_token_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def going_on(draft: Draft) -> Draft:
        if draft.probs is None or draft.tokens[-1] != 7:
            return draft
        return Draft((*draft.tokens, 1), [*draft.probs, None])

    claims(going_on)(monkeypatch)
    sampling = SamplingParams(temperature=1.0, seed=1, logit_bias={7: 2.0}, banned_token_ids=(1, 2))
    for verification in ("token", "block"):
        assert proof_of(with_an_end(), sampling, num_draft_tokens=2, verification=verification).reasons == []


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_broken_rule_fails_where_texts_end(monkeypatch: pytest.MonkeyPatch, verification: str) -> None:
    residual_dropped(monkeypatch)
    sampling = SamplingParams(temperature=1.0, seed=1, logit_bias={7: 2.0})
    proof = proof_of(with_an_end(), sampling, num_draft_tokens=3, verification=verification, samples=1000)
    assert any(reason.startswith("token pairs, it") for reason in proof.reasons)


def test_a_draft_without_some_of_the_vocabulary_passes() -> None:
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(4, seed=2), None, 6)
    assert proof_of(decoder).reasons == []


@pytest.mark.parametrize("seed", [1, 5])
def test_a_text_with_ids_that_the_draft_does_not_know_passes(seed: int) -> None:
    target = TableModel.random(12, seed=seed, max_length=256)
    decoder = SpeculativeDecoder(target, TableModel.random(8, seed=2, max_length=256), None, 12)
    for prompt in ([1, 2], [1, 11]):
        proof = proof_of(decoder, prompt=prompt)
        assert proof.reasons == []
        assert proof.caches


def test_a_draft_like_the_target_passes_and_is_accepted() -> None:
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(6, seed=1), None, 6)
    proof = proof_of(decoder)
    assert proof.reasons == []
    acceptance = [finding for finding in proof.findings if finding.name.startswith("drafts that stand")]
    assert [finding.detail for finding in acceptance] == ["1.0000 for 1.0000"] * 2


def test_real_graphs_pass(invoke: Invoke, tiny_bundle: Path) -> None:
    found = document(invoke, tiny_bundle, *PROMPT, "--samples", 400, "--temperature", 0.7, "--seed", 6)
    assert found["settings"]["precision"] == "fp32"
    assert max(one["tv"] for one in found["caches"]) < 1e-4


def test_real_graphs_with_a_broken_rule_fail(
    invoke: Invoke, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    residual_dropped(monkeypatch)
    assert failed(document(invoke, tiny_bundle, *PROMPT, "--temperature", 0.7, "--seed", 6, exit_code=1))
