"""What plans of drafts bring and could bring, without the clock: `python -m tests.tools.measure_planner --help`.

A file of recordings holds texts that a pair wrote once. The decoder's own loop, drafter and planner then write them
again with models that only look the next token up, and a simulated clock that runs by a profile of `paceline tune`.
That takes seconds and comes out the same each time. Printed beside it are two limits: what a foresight would bring that
knows how many tokens stand of each drafter's proposal, and drafts just these, whichever drafter is worth more. No plan
of these two drafters is faster by this clock; what rounds take outside the models is left out everywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline import SamplingParams
from paceline.cost_profile import CostProfile
from paceline.costs import Costs, CostsByLength
from paceline.drafters import PromptLookupDrafter
from paceline.planner import MOST_DRAFT_TOKENS
from paceline.streams import Streams
from paceline_tools.tables import number, table

from .measure_peers import all_prompts
from .peers.prompts import CODE, EDIT, Prompt
from .peers.report import geometric_mean
from .recorded import Recording, in_words, record, recorded_pair

_FIXED = (1, 2, 3, 4)
# The int4 Qwen pair on two cores, by a profile of `paceline tune`; seconds.
_COSTS = Costs(0.0105, (0.030, 0.038, 0.047, 0.055, 0.064))


@dataclass(frozen=True, slots=True)
class Figures:
    """Speedups of one text over plain decoding.

    Attributes:
        auto: of the planner.
        predicted: what it expected.
        fixed: of fixed numbers of drafted tokens.
        whole: of the planner and the fixed numbers, with the prompt: a fixed number has the draft model read all of it.
        limit: of foresight.
        limit_draft: of foresight that may not copy.
        limit_copies: of foresight that may only copy: what is left where the draft model does not read a long prompt.
    """

    auto: float
    predicted: float
    fixed: tuple[float, ...]
    whole: tuple[float, ...]
    limit: float
    limit_draft: float
    limit_copies: float


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="measure_planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("recordings", type=Path, metavar="FILE", help="of recordings, a line of JSON each")
    add("--profile", type=Path, help="that the clock runs by, as `paceline tune -o` writes it (default: built in)")
    add("--noise", type=float, default=0.0, help="of that clock: standard deviation of the logarithm (default: 0)")
    add("--no-profile", action="store_true", help="the planner has no profile, and measures")
    add("--each", action="store_true", help="a line for each text, too")
    add("--bundle", type=Path, help="first record the prompts that the file lacks, with this pair")
    add("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl or .jsonl.gz; problems from 82 on stay shut")
    add("--num-code", type=int, default=12)
    add("--num-edits", type=int, default=4)
    add("--spec-bench", type=Path, metavar="FILE")
    add("--per-category", type=int, default=4, help="prompts of each of its categories (default: %(default)s)")
    add("--longest-prompt", type=int, default=2048, help="leave longer prompts out (default: %(default)s tokens)")
    add("--max-new-tokens", type=int, default=128, help="of each text (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy, the default")
    add("--top-p", type=float, default=1.0)
    add("--threads", type=int, help="of the models (default: one per core)")
    add("--seconds", type=float, default=float("inf"), help="stop recording behind so many; the next call goes on")
    return made


def read(path: Path) -> list[Recording]:
    """The recordings of a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Recording.from_dict(json.loads(line)) for line in lines]


def record_all(options: argparse.Namespace) -> None:
    """Add what the file lacks to it."""
    sampling = SamplingParams(options.temperature, top_p=options.top_p)
    done = {(one.prompt, one.sampling) for one in read(options.recordings)}
    options.demo = False
    decoder = paceline.load(options.bundle, threads=options.threads, prefix_cache_bytes=1 << 30)
    assert decoder.tokenizer is not None
    started = time.monotonic()
    with options.recordings.open("a", encoding="utf-8") as file:
        for prompt in by_turns(all_prompts(options)):
            ids = decoder.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            if (prompt.name, in_words(sampling)) in done or len(ids) > options.longest_prompt:
                continue
            if time.monotonic() - started > options.seconds:
                break
            one = record(decoder, prompt, ids, sampling, options.max_new_tokens, np.random.default_rng(len(done)))
            done.add((one.prompt, one.sampling))
            print(prompt.name, len(ids), len(one.token_ids), file=sys.stderr)
            file.write(json.dumps(one.as_dict()) + "\n")
            file.flush()


def by_turns(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts with one of each category before the second of any: so a part of them tells of all."""
    place = Counter[str]()
    keyed = []
    for prompt in prompts:
        place[prompt.category] += 1
        keyed.append((place[prompt.category], prompt))
    return [prompt for _, prompt in sorted(keyed, key=lambda one: one[0])]


def figures(one: Recording, costs: CostsByLength, noise: float, *, told: bool) -> Figures:
    """Write a text in every way."""
    decoder, prompt, seconds = recorded_pair(one, costs, noise=noise, told=told)

    def play(**how: Any) -> tuple[float, float, float]:
        """Seconds behind the prompt and of all, and the speedup that was expected."""
        before = seconds()
        generation = decoder.generate(prompt, max_new_tokens=one.max_new_tokens, **how)
        for _ in generation:
            pass
        stats = generation.stats
        if stats.new_tokens != len(one.token_ids):
            raise ValueError(f"{one.prompt}: {stats.new_tokens} tokens where {len(one.token_ids)} were recorded")
        return stats.target_s + stats.draft_s, seconds() - before, stats.predicted_speedup or 1.0

    plain, whole, _ = play(num_draft_tokens=0)
    auto = play()
    fixed = [play(num_draft_tokens=k, drafter="draft-model") for k in _FIXED]
    at = costs.at(len(one.prompt_ids) + len(one.token_ids) // 2)
    drafts, copies = _standing(one.proposed, one.token_ids), _copies(one)
    first = at.target(1) * (len(one.token_ids) - 1)
    return Figures(
        plain / auto[0],
        auto[2],
        tuple(plain / other[0] for other in fixed),
        tuple(whole / other[1] for other in (auto, *fixed)),
        first / _least_seconds(at, drafts, copies),
        first / _least_seconds(at, drafts, [0] * len(copies)),
        first / _least_seconds(at, [0] * len(drafts), copies),
    )


def _standing(proposed: Sequence[int], text: Sequence[int]) -> list[int]:
    """How many tokens stand of what the draft model proposes at each place."""
    standing = [0] * (len(text) + 1)
    for place in reversed(range(len(text))):
        standing[place] = standing[place + 1] + 1 if proposed[place] == text[place] else 0
    return standing[:-1]


def _copies(one: Recording) -> list[int]:
    """How many tokens stand of what prompt lookup proposes at each place."""
    lookup, chance = PromptLookupDrafter(), Streams.from_seed(0)
    lookup.prefill(one.prompt_ids)
    counts = []
    for place in range(len(one.token_ids)):
        copy = lookup.propose([*one.prompt_ids, *one.token_ids[:place]], MOST_DRAFT_TOKENS, chance).tokens
        pairs = zip(copy, one.token_ids[place:], strict=False)
        counts.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return counts


def _least_seconds(costs: Costs, drafts: Sequence[int], copies: Sequence[int]) -> float:
    """The least time that a text takes behind its first token, by foresight of what stands at each of its places."""
    least = [0.0] * (len(drafts) + 1)
    for place in reversed(range(1, len(drafts))):
        ways = []
        for step, standing in ((costs.draft_step, drafts[place]), (0.0, copies[place])):
            most = min(standing, MOST_DRAFT_TOKENS, len(drafts) - 1 - place)
            ways += [k * step + costs.target(k + 1) + least[place + k + 1] for k in range(most + 1)]
        least[place] = min(ways)
    return least[1]


def tables(found: dict[Recording, Figures], *, each: bool) -> str:
    """The figures by kind of sampling and category."""
    parts = []
    for sampling in dict.fromkeys(one.sampling for one in found):
        texts = {one: figure for one, figure in found.items() if one.sampling == sampling}
        groups: dict[str, list[Figures]] = {}
        for one, figure in texts.items():
            groups.setdefault(one.category, []).append(figure)
        if each:
            groups |= {f"{one.prompt} ({len(one.token_ids)})": [figure] for one, figure in texts.items()}
        parts.append(f"{sampling}: speedup over plain decoding")
        parts.append(table(_HEADER, [_row(name, group) for name, group in groups.items()]))
        least = min(texts, key=lambda one: texts[one].auto)
        code = [texts[one].auto for one in texts if one.category in CODE]
        other = [texts[one].auto for one in texts if one.category != EDIT]
        parts.append(
            f"code {number(geometric_mean(code))}, all without edits {number(geometric_mean(other))}, least "
            f"{number(texts[least].auto, 3)} on {least.prompt} ({len(least.token_ids)} tokens)"
        )
    return "\n\n".join(parts)


_HEADER = (
    *("", "texts", "auto", *(f"k{k}" for k in _FIXED), "÷ best", "with prompt", "predicted", "off by", "least"),
    *("limit", "draft alone", "copies alone"),
)


def _row(name: str, group: list[Figures]) -> tuple[str, ...]:
    def means(figures: Callable[[Figures], Sequence[float]]) -> list[float]:
        return [geometric_mean(values) or 0.0 for values in zip(*map(figures, group), strict=True)]

    def mean(figure: Callable[[Figures], float]) -> float:
        return means(lambda one: (figure(one),))[0]

    auto, predicted = mean(lambda one: one.auto), mean(lambda one: one.predicted)
    fixed, whole = means(lambda one: one.fixed), means(lambda one: one.whole)
    return (
        name,
        str(len(group)),
        number(auto),
        *map(number, fixed),
        number(auto / max(*fixed, 1.0), 3),
        number(whole[0] / max(*whole[1:], 1.0), 3),
        number(predicted),
        f"{100 * (predicted / auto - 1):+.0f} %",
        number(min(one.auto for one in group)),
        number(mean(lambda one: one.limit)),
        number(mean(lambda one: one.limit_draft)),
        number(mean(lambda one: one.limit_copies)),
    )


def main() -> int:
    options = parser().parse_args()
    if options.bundle:
        record_all(options)
    costs = CostProfile.read(options.profile).costs() if options.profile else CostsByLength((0,), (_COSTS,), "built in")
    found = {one: figures(one, costs, options.noise, told=not options.no_profile) for one in read(options.recordings)}
    print(tables(found, each=options.each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
