from __future__ import annotations

import pytest

from paceline.stats import Stats


def test_the_figures_of_a_generation_without_a_round_are_not_defined() -> None:
    stats = Stats(prompt_tokens=5).after_prefill(1)
    assert stats.new_tokens == 1
    for figure in (stats.acceptance_rate, stats.block_efficiency, stats.ms_per_token, stats.tokens_per_second):
        assert figure is None


def test_rounds_add_up() -> None:
    stats = Stats(prompt_tokens=5).after_prefill(1).after_round(3, 2, 3).after_round(4, 0, 1).after_round(0, 0, 1)
    assert stats.proposed_at == (2, 2, 2, 1)
    assert stats.accepted_at == (1, 1)
    assert (stats.rounds, stats.proposed, stats.accepted, stats.new_tokens) == (3, 7, 2, 6)
    assert stats.acceptance_rate == pytest.approx(2 / 7)
    assert stats.block_efficiency == pytest.approx(5 / 3)


def test_the_dictionary_has_the_documented_keys_and_derived_values() -> None:
    stats = Stats(10, 11, 1, 4, (4, 4), (4, 2), prefill_s=1.0, decode_s=2.0, target_s=1.2, draft_s=0.5)
    assert stats.as_dict() == {
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "new_tokens": 11,
        "rounds": 4,
        "proposed": 8,
        "accepted": 6,
        "acceptance_rate": 0.75,
        "block_efficiency": 2.5,
        "prefill_s": 1.0,
        "decode_s": 2.0,
        "ms_per_token": 200.0,
        "target_s": 1.2,
        "draft_s": 0.5,
        "overhead_s": pytest.approx(0.3),
        "predicted_speedup": None,
        "costs_from": None,
    }
    assert stats.tokens_per_second == 5


def test_tokens_of_the_pass_over_the_prompt_are_no_part_of_decoding() -> None:
    """Forced tokens may come with it."""
    stats = Stats(prompt_tokens=5, decode_s=1.0).after_prefill(4)
    assert stats.tokens_per_second is None
    stats = stats.after_round(2, 1, 2)
    assert (stats.block_efficiency, stats.tokens_per_second, stats.ms_per_token) == (2, 2, 500)
