"""What tokens left over from a rejected block are worth: would they be right behind the token that replaced one?

    python tests/tools/measure_leftovers.py BUNDLE PROMPTS.jsonl [NUM_DRAFT_TOKENS]

A round that rejects its i-th drafted token leaves those behind it over. For the first prompt of each category (objects
with `category` and `turns`) this drafts greedily, and counts how often the first token left over is the one that the
target emits behind its correction. Proposing it again costs a row of the next target pass: it pays where the share is
above what a row costs, in passes of one row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import paceline
from paceline.drafters import DraftModelDrafter
from paceline.streams import Chance
from paceline.verify import Draft

_NEW_TOKENS = 64

drafts: list[tuple[int, tuple[int, ...]]] = []
_propose = DraftModelDrafter.propose


def _recorded(self: DraftModelDrafter, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
    draft = _propose(self, tokens, num_draft_tokens, chance)
    drafts.append((len(tokens), draft.tokens))
    return draft


def leftovers(text: Sequence[int]) -> tuple[int, int]:
    """How many of the recorded drafts left a token over, and how often the first of these was right."""
    left_over = right = 0
    for position, draft in drafts:
        accepted = 0
        while (
            accepted < len(draft) and position + accepted < len(text) and draft[accepted] == text[position + accepted]
        ):
            accepted += 1
        behind = position + accepted + 1
        if accepted + 1 < len(draft) and behind < len(text):
            left_over += 1
            right += draft[accepted + 1] == text[behind]
    return left_over, right


def main(bundle: str, prompts: str, num_draft_tokens: str = "5") -> None:
    """Print a line for each category and one for all."""
    decoder = paceline.load(bundle)
    assert decoder.tokenizer is not None
    DraftModelDrafter.propose = _recorded  # type: ignore[method-assign]
    first: dict[str, str] = {}
    for line in Path(prompts).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        first.setdefault(entry["category"], entry["turns"][0])
    total = [0, 0]
    for category, prompt in first.items():
        drafts.clear()
        ids = decoder.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        generation = decoder.generate(
            ids, max_new_tokens=_NEW_TOKENS, num_draft_tokens=int(num_draft_tokens), drafter="draft-model"
        )
        for _ in generation:
            pass
        counts = leftovers([*ids, *generation.token_ids])
        print(f"{category}: {counts[1]} of {counts[0]} right", flush=True)
        total = [one + more for one, more in zip(total, counts, strict=True)]
    print(f"all: {total[1]} of {total[0]} right")


if __name__ == "__main__":
    main(*sys.argv[1:])
