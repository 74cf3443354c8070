"""The texts that come with paceline: for calibration, and, apart from it, for measuring quality.

All of them were written for paceline (Apache-2.0): prose, dialogues, mathematics, several languages, program code.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import torch

__all__ = ["HELD_OUT", "calibration_ids", "cut", "held_out_ids"]

HELD_OUT = ("prompts", "code")
_LENGTH = 256  # positions of a sequence, at most
_CALIBRATION_SEQUENCES = 32  # evenly spread over the texts
_HELD_OUT_TOKENS = 1024  # of each text, at most


def calibration_ids(tokenizer: Any, vocab_size: int, max_length: int) -> torch.Tensor:
    """Token ids of sequences of the calibration texts, evenly spread over them, int64 `[sequences, positions]`."""
    folder = files(__package__) / "text"
    names = ("prose", "passages", "maths", "languages", "code")
    texts = [(folder / f"{name}.txt").read_text(encoding="utf-8") for name in names]
    ids = [token_id for text in texts for token_id in _encode(tokenizer, text)]
    for messages in json.loads((folder / "dialogue.json").read_text(encoding="utf-8")):
        ids += _encode(tokenizer, _rendered(tokenizer, messages))
    sequences = cut(ids, vocab_size, max_length, len(ids))
    count = min(_CALIBRATION_SEQUENCES, len(sequences))
    return sequences[[index * len(sequences) // count for index in range(count)]]


def held_out_ids(tokenizer: Any, vocab_size: int, max_length: int) -> dict[str, list[torch.Tensor]]:
    """Token ids of the sequences of each text of `HELD_OUT`, each int64 `[positions]`."""
    folder = files(__package__) / "heldout"
    return {
        name: list(
            cut(
                _encode(tokenizer, (folder / f"{name}.txt").read_text(encoding="utf-8")),
                vocab_size,
                max_length,
                _HELD_OUT_TOKENS,
            )
        )
        for name in HELD_OUT
    }


def cut(ids: list[int], vocab_size: int, max_length: int, max_tokens: int) -> torch.Tensor:
    """Cut a text into sequences of one length, int64 `[sequences, positions]`; a few ids at the end may be left out."""
    ids = [token_id for token_id in ids if token_id < vocab_size][:max_tokens]
    count = max(1, -(-len(ids) // min(_LENGTH, max_length)))
    length = len(ids) // count
    return torch.tensor(ids[: count * length]).view(count, length)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """A dialogue in the tokenizer's own form, or in plain words where it has none."""
    if tokenizer.chat_template:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template may refuse system messages, or anything
            pass
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages) + "\n\n"
