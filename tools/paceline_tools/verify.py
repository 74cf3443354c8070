"""`paceline verify`: is the text really the target's? Tested on the user's own bundle and machine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import paceline
from paceline import Bundle, SamplingParams
from paceline.errors import InvalidInputError

from .arguments import FOLDER, NumberRange, check_text, engines_option, provider_option, threads_option
from .progress import stages
from .sampling_options import sampling_options, verification_option
from .tables import number, table

if TYPE_CHECKING:
    from .proof import Proof

__all__ = ["PROMPTS", "command"]

# Where language models know what comes, where they have a choice, and where draft and target disagree.
PROMPTS = ("def fibonacci(n):\n    ", "The capital of France is", "Once upon a time")


@click.command("verify")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--prompt",
    "texts",
    metavar="TEXT",
    multiple=True,
    help=f"A prompt to continue. May be repeated.  [default: {len(PROMPTS)} short ones]",
)
@click.option("--chat", is_flag=True, help="The prompts are users' messages: apply the bundle's chat template.")
@click.option(
    "--samples",
    metavar="N",
    type=click.IntRange(min=100),
    default=1000,
    show_default=True,
    help="Continuations of each prompt, drawn speculatively and plainly each.",
)
@click.option(
    "--draft-tokens",
    metavar="K",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Tokens to draft per round.",
)
@sampling_options(temperature=1.0)
@verification_option
@click.option(
    "--alpha",
    type=NumberRange(0, 0.5, min_open=True),
    default=0.001,
    show_default=True,
    help="Chance that an exact decoder fails, all tests together.",
)
@click.option("--seed", type=int, help="Makes the draws repeatable.  [default: a fresh one, which is printed]")
@provider_option
@engines_option
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def command(
    context: click.Context,
    /,
    folder: Path,
    texts: tuple[str, ...],
    chat: bool,
    samples: int,
    draft_tokens: int,
    verification: str,
    alpha: float,
    seed: int | None,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Test that speculative sampling with the bundle DIR keeps the target's law.

    Draws many continuations of a few prompts, and compares them with the target's own probabilities and with plain
    decoding; compares greedy texts and KV caches, too. The exit code is 1 when something differs by more than chance
    or rounding explains.
    """
    for text in texts:
        check_text("--prompt", text)
    sampling = SamplingParams(**knobs, seed=secrets.randbits(32) if seed is None else seed)
    decoder = paceline.load(folder, provider=provider, threads=threads, engines=engine_folder)
    tokenizer = decoder.tokenizer
    if decoder.draft is None or tokenizer is None:
        raise InvalidInputError(f"{folder} has no draft model, so nothing is speculative: export with --draft.")
    texts = texts or PROMPTS
    prompts = {
        f"prompt {index}": tokenizer.encode_chat([{"role": "user", "content": text}])
        if chat
        else tokenizer.encode(text)
        for index, text in enumerate(texts, 1)
    }

    from .invariants import tolerance_of
    from .proof import prove

    target = Bundle.open(folder).manifest.target
    precision = target.precision
    with stages() as on_progress:
        proof = prove(
            decoder,
            prompts,
            sampling,
            num_draft_tokens=draft_tokens,
            verification=verification,
            samples=samples,
            alpha=alpha,
            tolerance=tolerance_of(target),
            on_progress=on_progress,
        )
    if as_json:
        settings = {
            "bundle": str(folder),
            "precision": precision,
            "prompts": dict(zip(prompts, texts, strict=True)),
            "chat": chat,
            "samples": samples,
            "num_draft_tokens": draft_tokens,
            "verification": verification,
            **asdict(sampling),
            "provider": provider,
            "threads": threads,
        }
        click.echo(json.dumps({**proof.as_dict(), "settings": settings}, indent=1, ensure_ascii=False))
    else:
        click.echo(_text(proof, dict(zip(prompts, texts, strict=True)), sampling, draft_tokens, samples))
    if not proof.passed:
        context.exit(1)


def _text(proof: Proof, prompts: Mapping[str, str], sampling: SamplingParams, k: int, samples: int) -> str:
    from .invariants import Difference

    lines = [f"{name}: {text!r}" for name, text in prompts.items()]
    if proof.findings:
        lines += ["", _law(proof)]
        lines.append(
            f"{samples} speculative (K = {k}) and {samples} plain continuations of each prompt, seed {sampling.seed}, "
            f"by {proof.passes[0]} target and {proof.passes[1]} draft passes. Effect: distance from the law, total "
            "variation for tokens, difference of rates for acceptances, largest difference of cumulated frequencies "
            "for ranks. By chance: the mean effect of exact draws. Corrected: Holm, for the number of tests."
        )
    else:
        lines += ["", "Temperature 0 draws nothing: the law was not tested."]

    parted = [text for text in proof.greedy if text.parts_at is not None]
    equal = len(proof.greedy) - len(parted)
    lines += ["", f"Greedy texts: {equal} of {len(proof.greedy)} equal plain decoding's token for token."]
    lines += [
        f"  {text.prompt}, K = {text.num_draft_tokens}: parts at token {text.parts_at} of {text.length}, "
        f"{text.gap:.2g} below the best logit (tolerance {proof.tolerance.gap:g})"
        for text in parted
    ]
    caches, rounding = Difference.largest(proof.caches), Difference.largest(proof.rounding)
    mean = sum(one.tv for one in proof.rounding) / max(len(proof.rounding), 1)
    lines.append(
        f"KV caches: after {len(proof.caches)} rejections and acceptances live ones differ from fresh ones by at most "
        f"{caches.logit:.2g} in a logit, TV {caches.tv:.2g} (tolerance {proof.tolerance.cache:g})."
    )
    lines.append(
        f"Rounding of the kernels, no part of the verdict: {len(proof.rounding)} of the target's rows, scored in a "
        f"round's pass and alone, differ by at most {rounding.logit:.2g} in a logit, TV {rounding.tv:.2g}, in the mean "
        f"{mean:.2g}."
    )
    lines += ["", _verdict(proof)]
    return "\n".join(lines)


def _law(proof: Proof) -> str:
    header = ("test", "draws", "", "effect", "by chance", "p", "corrected", "")
    rows: list[Sequence[str]] = [
        (
            finding.name,
            str(finding.samples),
            finding.detail,
            number(finding.effect, 4),
            number(finding.noise, 4),
            f"{finding.p_value:.2g}",
            f"{p_value:.2g}",
            "ok" if p_value >= proof.alpha else "FAILED",
        )
        for finding, p_value in zip(proof.findings, proof.corrected, strict=True)
    ]
    return table(header, rows)


def _verdict(proof: Proof) -> str:
    if proof.passed and not proof.findings:
        return "PASSED: greedy texts and caches agree."
    if proof.passed:
        return (
            f"PASSED: nothing tells speculative sampling from the target's law (smallest corrected p "
            f"{min(proof.corrected):.2g}, alpha {proof.alpha:g}); greedy texts and caches agree."
        )
    return "\n".join(["FAILED:", *(f"  {reason}" for reason in proof.reasons)])
