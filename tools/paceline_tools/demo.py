"""`paceline demo`: answers to three prompts, then speculative against plain decoding in figures."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click

import paceline
from paceline.errors import InvalidInputError
from paceline.files import write_whole
from paceline.tokenizer import Tokenizer

from .arguments import FOLDER, OUTPUT_FILE, DraftTokens, engines_option, provider_option, threads_option
from .measure import Comparison, compare, machine
from .progress import stages
from .tables import number, percent, table

__all__ = ["PROMPTS", "command"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the demo, and its name in the table."""

    name: str
    text: str


PROMPTS = (
    Prompt(
        "write a function",
        "Write a Python function that merges two sorted lists into one sorted list, with type hints and a docstring.",
    ),
    Prompt("explain a concept", "Explain how a hash map handles collisions, in two paragraphs."),
    Prompt(
        "fix a bug",
        "Fix the bug in this code:\n\n"
        "def mean(xs):\n    s = 0\n    for x in xs:\n        s += x\n    return s / len(x)\n",
    ),
)


@click.command("demo")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--draft-tokens",
    metavar="K|auto",
    type=DraftTokens(least=1),
    default="auto",
    show_default=True,
    help="Tokens to draft per round; auto plans each round for speed.",
)
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Most tokens to write for each prompt.",
)
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Measured runs of each prompt, plain and speculative each; an even number is fair to both orders.",
)
@provider_option
@engines_option
@threads_option
@click.option(
    "--json",
    "json_file",
    type=OUTPUT_FILE,
    help="Write the figures, too.",
)
def command(
    folder: Path,
    draft_tokens: int | str,
    max_new_tokens: int,
    repeats: int,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Answer three prompts with the bundle DIR, then measure.

    The answers are greedy and speculative. Then every prompt runs plain and speculative in turn, and a table compares
    the two. Both should write the same text; where they do not, the place is shown.
    """
    decoder = paceline.load(folder, provider=provider, threads=threads, engines=engine_folder)
    if decoder.draft is None or decoder.tokenizer is None:
        raise InvalidInputError(f"{folder} has no draft model, and the demo compares with one: export with --draft.")
    encode = decoder.tokenizer.encode_chat
    prompts = [(prompt, encode([{"role": "user", "content": prompt.text}])) for prompt in PROMPTS]
    # All of them, which checks the arguments, before anything is printed; none runs before its first step.
    generations = [
        decoder.generate(token_ids, num_draft_tokens=draft_tokens, max_new_tokens=max_new_tokens)
        for _, token_ids in prompts
    ]
    for (prompt, _), answer in zip(prompts, generations, strict=True):
        sys.stdout.write(f"── {prompt.name} ──\n{prompt.text.rstrip()}\n\n")
        sys.stdout.flush()
        with answer as generation:
            for step in generation:
                sys.stdout.write(step.text)
                sys.stdout.flush()
        sys.stdout.write(" …\n\n" if generation.finish_reason == "length" else "\n\n")
        sys.stdout.flush()

    results: list[tuple[Prompt, Comparison]] = []
    with stages() as on_progress:
        for index, (prompt, token_ids) in enumerate(prompts):
            done = 0

            def on_run(index: int = index, prompt: Prompt = prompt) -> None:
                nonlocal done
                done += 1
                on_progress(f"measure: {prompt.name}", (index + done / (2 * repeats)) / len(prompts))

            on_progress(f"measure: {prompt.name}", index / len(prompts))
            comparison = compare(
                decoder,
                token_ids,
                num_draft_tokens=draft_tokens,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                on_run=on_run,
            )
            results.append((prompt, comparison))

    click.echo(_text(results, decoder.tokenizer, draft_tokens, max_new_tokens, repeats))
    if json_file is not None:
        document = {
            "command": ["paceline", *sys.argv[1:]],
            "machine": machine(),
            "prompts": {prompt.name: comparison.as_dict() for prompt, comparison in results},
        }
        write_whole(json_file, json.dumps(document, indent=1) + "\n")


def _text(
    results: list[tuple[Prompt, Comparison]], tokenizer: Tokenizer, k: int | str, max_new_tokens: int, repeats: int
) -> str:
    header = ("tokens/s", "plain", f"K = {k}", "speedup", "acceptance", "block efficiency", "overhead", "same text")
    rows = [
        (
            prompt.name,
            number(comparison.plain_tokens_per_second, 1),
            number(comparison.speculative_tokens_per_second, 1),
            number(comparison.speedup, 2, "×"),
            percent(comparison.acceptance_rate),
            number(comparison.block_efficiency),
            percent(comparison.overhead_share),
            "yes" if comparison.divergence is None else f"to token {comparison.divergence.index}",
        )
        for prompt, comparison in results
    ]
    lines = [table(header, rows), ""]
    lines.append(
        f"Greedy, {max_new_tokens} new tokens at most, median of {repeats} interleaved runs each, warm-up apart. "
        "Acceptance: drafted tokens that stood. Block efficiency: tokens per target pass. Overhead: the share of "
        "decoding time outside both models' runs."
    )
    parted = [(prompt, comparison.divergence) for prompt, comparison in results if comparison.divergence]
    lines.append(
        f"Plain and speculative texts are identical for {len(results) - len(parted)} of {len(results)} prompts."
    )
    for prompt, divergence in parted:
        tokens = (divergence.plain_token, divergence.speculative_token)
        plain, speculative = (repr(tokenizer.decode([t])) if t is not None else "the end" for t in tokens)
        what = "the target's two best" if divergence.between_the_best else "NOT the target's two best"
        lines.append(
            f"  {prompt.name}: at new token {divergence.index} plain has {plain}, speculative {speculative}, "
            f"{what}; the two best logits are {divergence.gap:.2g} apart"
        )
    if parted:
        lines.append("  Quantised kernels round differently with the number of rows, which can tip a near-tie.")
    return "\n".join(lines)
