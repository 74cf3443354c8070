"""Print what drafters and plans bring on a bundle: `python tests/tools/measure_drafts.py BUNDLE [PROMPTS.jsonl]`.

For each prompt all ways of decoding run in turn, twice, in opposite orders; the figures are ratios of the summed times
per token to plain decoding's. PROMPTS.jsonl is Spec-Bench's format; two prompts of each category are taken.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from typing import Any

import paceline
from paceline import SamplingParams
from paceline_tools.demo import PROMPTS

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_draft_tokens": 0},
    "K = 3": {"num_draft_tokens": 3},
    "auto, draft-model": {"drafter": "draft-model"},
    "auto, prompt-lookup": {"drafter": "prompt-lookup"},
    "auto, hybrid": {},
}
SAMPLINGS = {"greedy": SamplingParams(), "temperature 0.7, top-p 0.95": SamplingParams(0.7, top_p=0.95)}
NEW_TOKENS, LONGEST_PROMPT = 128, 1024


def prompts_of(path: str) -> list[tuple[str, str]]:
    taken: dict[str, int] = defaultdict(int)
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if taken[row["category"]] < 2:
                taken[row["category"]] += 1
                found.append((row["category"], row["turns"][0]))
    return found


def main() -> None:
    decoder = paceline.load(sys.argv[1])
    assert decoder.tokenizer is not None
    prompts = [(f"demo: {prompt.name}", prompt.text) for prompt in PROMPTS]
    if len(sys.argv) > 2:
        prompts += prompts_of(sys.argv[2])
    for name, sampling in SAMPLINGS.items():
        ratios: dict[str, list[float]] = defaultdict(list)
        print(f"\n{name}: speedup over plain decoding")
        for category, text in prompts:
            ids = decoder.tokenizer.encode_chat([{"role": "user", "content": text}])[-LONGEST_PROMPT:]
            times: dict[str, list[float]] = defaultdict(list)
            for order in (list(WAYS), list(reversed(WAYS))):
                for way in order:
                    generation = decoder.generate(ids, sampling, max_new_tokens=NEW_TOKENS, **WAYS[way])
                    for _ in generation:
                        pass
                    if generation.stats.ms_per_token:
                        times[way].append(generation.stats.ms_per_token)
            medians = {way: statistics.mean(values) for way, values in times.items()}
            for way in WAYS:
                ratios[way].append(medians["plain"] / medians[way])
            row = "  ".join(f"{way} {ratios[way][-1]:.2f}" for way in list(WAYS)[1:])
            print(f"{category:24} plain {medians['plain']:5.1f} ms  {row}", flush=True)
        for way, values in ratios.items():
            mean = math.exp(statistics.mean(map(math.log, values)))
            print(f"geometric mean, {way}: {mean:.3f}, least {min(values):.2f}")


if __name__ == "__main__":
    main()
