"""`paceline generate`: text from a bundle. The text goes to stdout, all else to stderr."""

from __future__ import annotations

import errno
import json
import secrets
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

import paceline
from paceline import Generation, SamplingParams, SpeculativeDecoder, Stats
from paceline.constraint import Constraint
from paceline.drafters import DRAFTERS
from paceline.errors import InvalidInputError
from paceline.grammar import GrammarConstraint

from .arguments import (
    DRAFT_TOKENS,
    FOLDER,
    check_text,
    engines_option,
    profile_option,
    provider_option,
    threads_option,
)
from .sampling_options import sampling_options, verification_option
from .tables import duration, number, percent

__all__ = ["command", "stats_text"]


@click.command("generate")
@click.argument("bundle", metavar="DIR", type=FOLDER)
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Read the prompt from a file in UTF-8; - is stdin. One newline at its end is dropped.",
)
@click.option("--chat", is_flag=True, help="The prompt is a user's message: apply the bundle's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system's message.")
@click.option(
    "--draft-tokens",
    metavar="K|auto",
    type=DRAFT_TOKENS,
    default="auto",
    show_default=True,
    help="Tokens to draft per round; 0 is plain decoding, auto plans each round for speed.",
)
@click.option(
    "--drafter", type=click.Choice(list(DRAFTERS)), help="What drafts.  [default: what is expected to be fastest]"
)
@sampling_options(temperature=0.0)
@verification_option
@click.option(
    "--draft-temperature",
    metavar="T",
    type=float,
    help="The draft model's own temperature, which leaves the text's law alone.  [default: as --temperature]",
)
@click.option("--seed", type=int, help="Makes a sampled text repeatable.  [default: a fresh one, which --stats shows]")
@click.option("--max-new-tokens", metavar="N", type=int, default=256, show_default=True, help="Most tokens to write.")
@click.option("--stop", metavar="TEXT", multiple=True, help="A string that ends the text. May be repeated.")
@click.option("--stop-token-id", metavar="ID", type=int, multiple=True, help="An id that ends it. May be repeated.")
@click.option(
    "--json-schema",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write JSON that this schema accepts.",
)
@click.option("--regex", metavar="PATTERN", help="Write text that matches this regular expression as a whole.")
@click.option(
    "--logprobs",
    metavar="N",
    type=int,
    help="With --json: the logprob of every token, and of the N most probable ones.",
)
@provider_option
@engines_option
@threads_option
@profile_option
@click.option("--stats", "show_stats", is_flag=True, help="Print counters and timings to stderr at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end instead of the text.")
@click.pass_context
def command(
    context: click.Context,
    /,
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    draft_tokens: int | str,
    drafter: str | None,
    verification: str,
    draft_temperature: float | None,
    seed: int | None,
    max_new_tokens: int,
    stop: tuple[str, ...],
    stop_token_id: tuple[int, ...],
    json_schema: Path | None,
    regex: str | None,
    logprobs: int | None,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
    show_stats: bool,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Generate text with the bundle in DIR.

    The prompt comes from --prompt, --prompt-file, or stdin. Ctrl-C ends the text with exit code 130.
    """
    if system is not None and not chat:
        raise click.UsageError("--system is a message of a chat; give --chat too.")
    text = _prompt(prompt, prompt_file)
    for option, value in (
        ("--prompt", text),
        ("--system", system or ""),
        ("--regex", regex or ""),
        *(("--stop", one) for one in stop),
    ):
        check_text(option, value)
    if chat and not text:
        raise click.UsageError("The prompt is empty; a chat needs a message to answer.")
    if json_schema is not None and regex is not None:
        raise click.UsageError("--json-schema and --regex exclude each other; give one of them.")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs are printed in the JSON document; give --json too.")
    if knobs["temperature"] > 0 and seed is None:
        seed = secrets.randbits(32)  # drawn here, so that it can be told
    sampling = SamplingParams(**knobs, seed=seed)
    draft_sampling = None
    if draft_temperature is not None:
        try:
            draft_sampling = replace(sampling, temperature=draft_temperature, seed=None)
        except InvalidInputError as error:
            raise click.UsageError(f"--draft-temperature: {error}") from error

    decoder = paceline.load(
        bundle,
        provider=provider,
        threads=threads,
        profile=None if profile == "none" else profile,
        engines=engine_folder,
    )
    generation = decoder.generate(
        _chat_ids(decoder, text, system) if chat else text,
        sampling,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=draft_tokens,
        drafter=drafter,
        verification=verification,
        draft_sampling=draft_sampling,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=stop_token_id,
        constraint=_constraint(decoder, json_schema, regex),
    )
    settings = {
        "bundle": str(bundle),
        "chat": chat,
        "num_draft_tokens": draft_tokens,
        "drafter": drafter,
        "verification": verification,
        "draft_temperature": draft_temperature,
        **asdict(sampling),
        "max_new_tokens": max_new_tokens,
        "stop": list(stop),
        "stop_token_ids": list(stop_token_id),
        "json_schema": None if json_schema is None else str(json_schema),
        "regex": regex,
        "logprobs": logprobs,
        "provider": provider,
        "threads": threads,
        "profile": profile,
    }
    interrupted = _stream(generation, silent=as_json)
    if as_json:
        click.echo(json.dumps(_document(generation, settings), ensure_ascii=False))
    if show_stats:
        click.echo(stats_text(generation.stats, generation.finish_reason, seed), err=True)
    if interrupted:
        context.exit(130)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text from the one place that was named, or from a pipe."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other; give one of them.")
    if prompt is not None:
        return prompt
    if prompt_file is None and _is_terminal():
        raise click.UsageError("There is no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it into stdin.")
    if prompt_file is None or str(prompt_file) == "-":
        where, read = "stdin", _read_stdin
    else:
        where, read = str(prompt_file), prompt_file.read_bytes
    try:
        data = read()
    except OSError as error:
        raise click.ClickException(
            f"The prompt cannot be read from {where} ({error.strerror or error}); give --prompt TEXT, or another "
            "--prompt-file."
        ) from error
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"The prompt from {where} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}. Convert it first, "
            "for instance with iconv -t UTF-8."
        ) from error


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_stdin() -> bytes:
    if sys.stdin is None:  # as after `<&-`
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read()


def _chat_ids(decoder: SpeculativeDecoder, text: str, system: str | None) -> list[int]:
    assert decoder.tokenizer is not None  # load() always gives one
    messages = [{"role": "system", "content": system}] if system is not None else []
    return decoder.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _constraint(decoder: SpeculativeDecoder, json_schema: Path | None, regex: str | None) -> Constraint | None:
    assert decoder.tokenizer is not None  # load() always gives one
    if regex is not None:
        return GrammarConstraint.from_regex(decoder.tokenizer, regex)
    if json_schema is None:
        return None
    try:
        schema = json_schema.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The JSON schema {json_schema} is not UTF-8 at byte {error.start}.") from error
    return GrammarConstraint.from_json_schema(decoder.tokenizer, schema)


def _stream(generation: Generation, *, silent: bool) -> bool:
    """Run the generation and print its text as it comes; returns whether Ctrl-C ended it."""
    interrupted = False
    try:
        for step in generation:
            if step.text and not silent:
                sys.stdout.write(step.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        generation.close()
    if not silent and (interrupted or not generation.text.endswith("\n")):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return interrupted


def _document(generation: Generation, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        **({} if generation.logprobs is None else {"logprobs": [asdict(one) for one in generation.logprobs]}),
        "stats": generation.stats.as_dict(),
        "settings": settings,
    }


def stats_text(stats: Stats, finish_reason: str | None, seed: int | None) -> str:
    """Counters and timings of one generation, for people."""
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens in {duration(stats.prefill_s)}"),
        (
            "new text",
            f"{stats.new_tokens} tokens in {duration(stats.decode_s)} ({number(stats.tokens_per_second, 1)} tokens/s, "
            f"{number(stats.ms_per_token, 1)} ms/token), ended by {finish_reason or 'an interruption'}",
        ),
        ("rounds", f"{stats.rounds}, block efficiency {number(stats.block_efficiency)} tokens per target pass"),
        (
            "drafted",
            f"{stats.proposed} tokens, {stats.accepted} accepted: acceptance rate {percent(stats.acceptance_rate)}",
        ),
        (
            "time",
            f"target {duration(stats.target_s)}, draft {duration(stats.draft_s)}, else {duration(stats.overhead_s)}",
        ),
    ]
    if stats.costs_from is not None:
        predicted = number(stats.predicted_speedup, 2, "×")
        rows.append(("plan", f"predicted speedup {predicted} over plain decoding; costs {stats.costs_from}"))
    if seed is not None:
        rows.append(("seed", str(seed)))
    return "\n".join(f"{name:<9} {text}" for name, text in rows)
