"""Which ids a draft model keeps its logits for. What it cannot propose the target still says: the law is the same."""

from __future__ import annotations

import importlib.resources
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidInputError

from .pair import token_texts

__all__ = ["corpus", "useful_ids"]


def useful_ids(tokenizer: Any, end_token_ids: Iterable[int], count: int) -> NDArray[np.int32]:
    """The `count` ids that are drafted most often, rising.

    Special, added and end tokens come first, then what the corpus holds, the more frequent before. Of the others each
    script keeps the same share, in order of the ids: those of a tokenizer that was made by merging, or by scores, come
    from frequent to rare, but a vocabulary may be several, one behind the other (Qwen's Chinese stands behind 100,000).

    Args:
        tokenizer: a fast tokenizer of transformers.
        end_token_ids: that end a text.
        count: more than there are special, added and end tokens, and at most the number of ids.

    Returns:
        int32 `[count]`.

    Raises:
        InvalidInputError: `count` is smaller or larger.
    """
    texts = token_texts(tokenizer)
    always = {*end_token_ids, *tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    known = [token_id for token_id, text in enumerate(texts) if text is not None]
    if not len(always) < count <= len(known):
        raise InvalidInputError(
            f"A draft vocabulary of {count} ids is not possible: of {len(known)} ids, {len(always)} are special, added "
            f"or end tokens, which are always kept; choose from {len(always) + 1} to {len(known)}, or 0 for all."
        )
    counts: Counter[int] = Counter()
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(corpus()), add_special_tokens=False):
        counts.update(encoding.ids)
    share = _rank_in_script(tokenizer, known)
    order = sorted(known, key=lambda token_id: (token_id not in always, -counts[token_id], share[token_id], token_id))
    return np.sort(np.array(order[:count], np.int32))


def _rank_in_script(tokenizer: Any, ids: list[int]) -> dict[int, float]:
    """Where each id stands among those of its script, from 0 to 1; ids without a letter are a script of their own."""
    texts = tokenizer.backend_tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    by_script: dict[str, list[int]] = {}
    for token_id, text in zip(ids, texts, strict=True):
        letter = next((character for character in text if character.isalpha()), "")
        script = unicodedata.name(letter, "").partition(" ")[0] if letter else ""
        by_script.setdefault(script, []).append(token_id)
    return {token_id: rank / len(own) for own in by_script.values() for rank, token_id in enumerate(own)}


def corpus() -> Iterator[str]:
    """Prose in two dozen languages, code, mark-up and formulas; numbers, and runs of white space and signs.

    The file beside this one was written for the purpose; its code blocks come fenced and bare.
    """
    text = importlib.resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")
    yield text
    yield from text.split("```")
    yield " ".join(map(str, range(1000)))
    yield ", ".join(map(str, range(1900, 2031)))
    yield " ".join(f"{number:02d}" for number in range(100))
    for run in (" ", "\t", "\n", "\r\n", "-", "=", "*", "#", "_", ".", "/", "~"):
        for length in range(1, 33):
            yield f"a{run * length}b\n{run * length}"
    yield from (f"{left}a{right}" for left, right in ("()", "[]", "{}", '""', "''", "<>", "``", "«»", "“”", "（）"))
