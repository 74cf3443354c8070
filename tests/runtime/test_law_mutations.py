"""Every published mistake, made on purpose: each must bend the enumerated law by far more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from paceline import testing, verify
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams, distribution
from paceline.streams import Chance, Purpose
from paceline.verify import DraftProbs, TargetProbs, Verdict

from .law_cases import PROMPT, decoder_law, law_of, table
from .reference import Setting, reference_law, total_variation

Mutation: TypeAlias = Callable[[pytest.MonkeyPatch], None]

K = 2
SETTINGS = {
    "temperature": Setting(SamplingParams(1.0)),
    "penalties": Setting(SamplingParams(1.0, presence_penalty=0.8, frequency_penalty=0.8)),
    "n-grams": Setting(SamplingParams(1.0, no_repeat_ngram_size=2)),
    "min-p": Setting(SamplingParams(1.0, min_p=0.3)),
    "min new tokens": Setting(SamplingParams(1.0, min_new_tokens=2), frozenset({0})),
}


def distance(setting: Setting, rule: str, **drafts: Any) -> float:
    target = table(4, 0)
    drafts = drafts or {"draft": table(4, 100)}
    expected, _ = reference_law(target, PROMPT, K + 1, setting)
    return total_variation(law_of(target, K + 1, setting, num_draft_tokens=K, rule=rule, **drafts), expected)


def swap(patch: pytest.MonkeyPatch) -> None:
    """The ratio upside down."""
    right = verify._ratio
    patch.setattr(verify, "_ratio", lambda target, draft: right(draft, target))


def drop_residual(patch: pytest.MonkeyPatch) -> None:
    """The recovered token from the target's row instead of the residual."""
    patch.setattr(verify, "residual", lambda target_row, draft_row, token, scale=1.0: target_row)


def share_noise(patch: pytest.MonkeyPatch) -> None:
    """Case 2: the number that drew the draft token draws the recovered token again."""
    right = testing._Branch._choose

    def choose(self: testing._Branch, key: tuple[int, Purpose, int], edges: Any) -> int:
        if key[1] is Purpose.RECOVER:
            key = next(known for known in self._intervals if known[:2] == (key[0], Purpose.DRAFT))
        return right(self, key, edges)

    patch.setattr(testing._Branch, "_choose", choose)


def grid(patch: pytest.MonkeyPatch) -> None:
    """Accept tests by one of the numbers 0, 0.01, …, 1."""
    right = testing._Branch.happens

    def happens(self: testing._Branch, probability: float, *key: Any, **start: Any) -> bool:
        return right(self, sum(level / 100 < probability for level in range(101)) / 101, *key, **start)

    patch.setattr(testing._Branch, "happens", happens)


def shift_rows(patch: pytest.MonkeyPatch) -> None:
    """Every target row taken one too early."""
    _with_rows(patch, lambda row, count: max(row - 1, 0))


def shift_bonus(patch: pytest.MonkeyPatch) -> None:
    """The bonus token of a fully accepted draft taken from the last drafted row."""
    _with_rows(patch, lambda row, count: min(row, max(count - 1, 0)))


def _with_rows(patch: pytest.MonkeyPatch, other: Callable[[int, int], int]) -> None:
    def mutated(right: Callable[..., Verdict]) -> Callable[..., Verdict]:
        return lambda tokens, draft_probs, target_probs, chance, at: right(
            tokens, draft_probs, lambda row: target_probs(other(row, len(tokens))), chance, at
        )

    patch.setattr(verify, "VERIFICATION_RULES", {k: mutated(v) for k, v in verify.VERIFICATION_RULES.items()})


def _shift_recovered(step: int) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def verify_token(
            tokens: Sequence[int], draft_probs: Sequence[DraftProbs], target: TargetProbs, chance: Chance, at: int
        ) -> Verdict:
            for row, token in enumerate(tokens):
                draft_row = draft_probs[row]
                assert draft_row is not None
                if not chance.happens(min(1, target(row)[token] / draft_row[token]), at + row, Purpose.ACCEPT):
                    other = min(max(row + step, 0), len(tokens) - 1)
                    weights = verify.residual(target(other), draft_probs[other], token)
                    return Verdict(row, chance.draw(weights, at + row, Purpose.RECOVER))
            return Verdict(len(tokens), chance.draw(target(len(tokens)), at + len(tokens), Purpose.TARGET))

        patch.setattr(verify, "VERIFICATION_RULES", {"token": verify_token})

    mutate.__name__ = f"recover_from_row_{step:+}"
    return mutate


def forget_carried(patch: pytest.MonkeyPatch) -> None:
    """Case 4: the block rule with the token rule's residual."""
    right = verify.residual
    patch.setattr(
        verify, "residual", lambda target_row, draft_row, token, scale=1.0: right(target_row, draft_row, token)
    )


def leave_early(patch: pytest.MonkeyPatch) -> None:
    """The block rule that stops at the first prefix which does not stand."""
    patch.setattr(verify, "VERIFICATION_RULES", {"block": lambda *given: _block(*given, leaves_early=True)})


def token_acceptance(patch: pytest.MonkeyPatch) -> None:
    """Case 4: a block rule whose prefixes stand by the carried ratio alone."""
    patch.setattr(verify, "VERIFICATION_RULES", {"block": lambda *given: _block(*given, by_ratio=True)})


def row_before(patch: pytest.MonkeyPatch) -> None:
    """A block rule that compares the rows of the token which stands, not of the next one."""
    patch.setattr(verify, "VERIFICATION_RULES", {"block": lambda *given: _block(*given, ahead=0)})


def _block(
    tokens: Sequence[int],
    draft_probs: Sequence[Any],
    target: TargetProbs,
    chance: Chance,
    at: int,
    *,
    leaves_early: bool = False,
    by_ratio: bool = False,
    ahead: int = 1,
) -> Verdict:
    """Block verification as the paper writes it, forwards, with mistakes to choose."""
    count, reached, stands = len(tokens), [1.0], 0
    for i in range(1, count + 1):
        ratio = target(i - 1)[tokens[i - 1]] / draft_probs[i - 1][tokens[i - 1]]
        reached.append(min(1.0, reached[-1] * ratio))
        probability = reached[i]
        if i < count and not by_ratio:
            row = i - 1 + ahead
            over = float(np.maximum(reached[i] * target(row) - draft_probs[row], 0).sum())
            probability = over / (over + 1 - reached[i]) if over + 1 - reached[i] > 0 else 1.0
        if chance.happens(probability, at + i - 1, Purpose.ACCEPT, round_start=at):
            stands = i
        elif leaves_early:
            break
    if stands == count:
        return Verdict(count, chance.draw(target(count), at + count, Purpose.TARGET))
    weights = np.maximum(reached[stands] * target(stands) - draft_probs[stands], 0)
    return Verdict(stands, chance.draw(weights if weights.sum() > 0 else target(stands), at + stands, Purpose.RECOVER))


def _in_target_rows(
    change: Callable[[RowSampler, FloatArray, Sequence[int], list[int]], FloatArray | None],
) -> Mutation:
    """Another distribution for the target's rows where `change` gives one."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        right = RowSampler.distribution

        def mutated(
            self: RowSampler, logits: FloatArray, tokens: Sequence[int], drafted: Sequence[int], model: str = "target"
        ) -> FloatArray:
            changed = change(self, logits, tokens, list(drafted)) if model == "target" else None
            return right(self, logits, tokens, drafted, model) if changed is None else changed

        patch.setattr(RowSampler, "distribution", mutated)

    return mutate


def _only_bonus(sampler: RowSampler, logits: FloatArray, tokens: Sequence[int], drafted: list[int]) -> Any:
    """Penalties, masks or min-p for the bonus token only (cases 12 and 16)."""
    return distribution(logits, SamplingParams(1.0)) if len(drafted) < K else None


def _without_draft(sampler: RowSampler, logits: FloatArray, tokens: Sequence[int], drafted: list[int]) -> Any:
    """Every row with the history before the round."""
    sampler._history = None if sampler._history is None else type(sampler._history)(len(PROMPT), 2)
    return distribution(sampler.adjusted(logits, tokens, []), sampler.params) if drafted else None


def _twice(sampler: RowSampler, logits: FloatArray, tokens: Sequence[int], drafted: list[int]) -> Any:
    """Case 14: the last drafted token counted twice."""
    return distribution(sampler.adjusted(logits, tokens, [*drafted, drafted[-1]]), sampler.params) if drafted else None


TOKEN_AND_BLOCK: list[Mutation] = [swap, drop_residual, share_noise, grid, shift_rows, shift_bonus]
TOKEN: list[Mutation] = [_shift_recovered(-1), _shift_recovered(1)]
BLOCK: list[Mutation] = [forget_carried, leave_early, token_acceptance, row_before]
ROWS: dict[str, tuple[str, Mutation]] = {
    "penalty on the last row only": ("penalties", _in_target_rows(_only_bonus)),
    "penalty by the text before the round": ("penalties", _in_target_rows(_without_draft)),
    "n-grams by the text before the round": ("n-grams", _in_target_rows(_without_draft)),
    "case 14: last token counted twice": ("penalties", _in_target_rows(_twice)),
    "case 16: min-p on the bonus token only": ("min-p", _in_target_rows(_only_bonus)),
    "case 12: min new tokens at the bonus token only": ("min new tokens", _in_target_rows(_only_bonus)),
}


@pytest.mark.parametrize(
    ("rule", "mutate"),
    [("token", m) for m in TOKEN_AND_BLOCK + TOKEN] + [("block", m) for m in TOKEN_AND_BLOCK + BLOCK],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_mutated_rule_bends_the_law(monkeypatch: pytest.MonkeyPatch, rule: str, mutate: Mutation) -> None:
    assert distance(SETTINGS["temperature"], rule) < 1e-9
    mutate(monkeypatch)
    assert distance(SETTINGS["temperature"], rule) > 1e-3


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ROWS)
def test_a_setting_that_misses_rows_bends_the_law(monkeypatch: pytest.MonkeyPatch, name: str, rule: str) -> None:
    setting, mutate = ROWS[name]
    assert distance(SETTINGS[setting], rule) < 1e-9
    mutate(monkeypatch)
    assert distance(SETTINGS[setting], rule) > 1e-3


def test_the_block_rule_as_the_paper_writes_it_has_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its mutations are red for their mistakes."""
    monkeypatch.setattr(verify, "VERIFICATION_RULES", {"block": _block})
    assert distance(SETTINGS["temperature"], "block") < 1e-9


def test_numbers_that_judge_a_position_in_two_rounds_bend_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block rule judges positions behind the prefix that stands; a later round judges them again."""

    def over_rounds() -> float:
        target, setting = table(2, 9), SETTINGS["temperature"]
        law = decoder_law(
            target, table(2, 109), setting, (1, 0), max_new_tokens=5, num_draft_tokens=K, verification="block"
        )
        return total_variation(law, reference_law(target, (1, 0), 5, setting)[0])

    assert over_rounds() < 1e-9
    right = testing._Branch.happens
    monkeypatch.setattr(testing._Branch, "happens", lambda self, *given, round_start=0: right(self, *given))
    assert over_rounds() > 1e-3
