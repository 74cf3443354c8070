"""Do a target and a draft have one tokenizer? Checked before any heavy work."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError

from .checkpoint import Checkpoint

__all__ = ["check_widths", "token_texts", "tokenizer_difference"]


def token_texts(tokenizer: Any) -> list[str | None]:
    """Text of every id of a fast tokenizer, in order of the ids; None where an id has none."""
    texts: list[str | None] = [None] * _num_ids(tokenizer)
    for text, token_id in tokenizer.get_vocab().items():
        texts[token_id] = text
    return texts


def _num_ids(tokenizer: Any) -> int:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return max(vocabulary.values(), default=-1) + 1


def check_widths(checkpoint: Checkpoint) -> None:
    """Check that a model scores, and can read, every id of its tokenizer; a wider (padded) model is legal.

    Raises:
        CheckpointError: the tokenizer has ids that the model does not know.
    """
    width, ids = checkpoint.config.vocab_size, _num_ids(checkpoint.tokenizer)
    if width < ids:
        raise CheckpointError(
            f"{checkpoint.source.name}: its tokenizer has {ids} ids, but the model knows only {width}; tokenizer and "
            "weights do not belong together."
        )


def tokenizer_difference(target: Checkpoint, draft: Checkpoint) -> str | None:
    """What tells the tokenizers of two models apart; None where every id means the same to both.

    Logits may be padded to different widths.

    Returns:
        A text that names both vocabularies and the first id that differs, or the special token.

    Raises:
        CheckpointError: a model narrower than its tokenizer.
    """
    check_widths(target)  # first: an absurd id would need a list of that length
    check_widths(draft)
    target_texts, draft_texts = token_texts(target.tokenizer), token_texts(draft.tokenizer)
    both = (
        f"target {target.source.name} ({len(target_texts)} ids, {target.config.vocab_size} logits) and "
        f"draft {draft.source.name} ({len(draft_texts)} ids, {draft.config.vocab_size} logits)"
    )
    for token_id in range(max(len(target_texts), len(draft_texts))):
        ours, theirs = (texts[token_id] if token_id < len(texts) else None for texts in (target_texts, draft_texts))
        if ours != theirs:
            return f"the vocabularies of {both} differ first at id {token_id}: {ours!r} against {theirs!r}"
    for name in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target.tokenizer, name), getattr(draft.tokenizer, name)
        if ours != theirs:
            return f"the tokenizers of {both} differ in {name}: {ours} against {theirs}"
    return None
