"""Measure paceline beside the systems that a user would pick instead: `python -m tests.tools.measure_peers --help`.

All engines stay loaded, each in a process of its own; one works and the others are stopped. Prompt by prompt every
method writes its text in turn, in an order that moves on with each prompt and turns round with each repeat. A line of
JSON is written after each text: a run that was broken off goes on with `--resume`, and `--report FILE` prints the
tables of what is there. All prompts go through the model's chat template, and every engine gets the same ids.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
from paceline.bundle import Bundle
from paceline.tokenizer import Tokenizer
from paceline_tools.demo import PROMPTS
from paceline_tools.measure import machine
from paceline_tools.peers.engines import EngineError, EngineProcess, adapter_command

from .peers.prompts import Prompt, edits, human_eval, spec_bench
from .peers.report import summarise, tables

_WARM_UP_TOKENS = 16
_TABLES, _SUMMARY = ".txt", ".json"  # what a report adds to the name of a file of measurements


def measurements_file(text: str) -> Path:
    """The path of a file of measurements, which its own tables and summary must not replace."""
    path = Path(text)
    if path.suffix in {_TABLES, _SUMMARY}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is where the report goes: name it {str(path.with_suffix('.jsonl'))!r}"
        )
    return path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="measure_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--report", type=measurements_file, metavar="FILE", help="only print the tables of a file of measurements")
    add("--bundle", type=Path, help="paceline's bundle, with a draft model")
    add("--llama-cpp", metavar="PYTHON:GGUF")
    add("--openvino", metavar="PYTHON:TARGET:DRAFT", help="folders as optimum-cli writes them")
    add("--genai", metavar="PYTHON:TARGET:DRAFT", help="folders as onnxruntime_genai.models.builder writes them")
    add("--genai-tuned", metavar="PYTHON:TARGET:DRAFT", help="the same, run without spinning threads")
    add("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl or .jsonl.gz; problems from 82 on stay shut")
    add("--num-code", type=int, default=12, help="problems of HumanEval (default: %(default)s)")
    add("--num-edits", type=int, default=4, help="edits of HumanEval's solutions (default: %(default)s)")
    add("--spec-bench", type=Path, metavar="FILE")
    add("--per-category", type=int, default=2, help="prompts of each of its categories (default: %(default)s)")
    add("--demo", action="store_true", help="the three prompts of paceline demo, too")
    add("--longest-prompt", type=int, default=2048, help="leave longer prompts out (default: %(default)s tokens)")
    add("--methods", default="*", help="patterns, by commas: 'paceline:*,openvino:k?' (default: all)")
    add("--max-new-tokens", type=int, default=128, help="of each text (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy, the default")
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=1, help="of the first repeat; below 0 paceline gets none, and plans by the clock")
    add("--ignore-end", action="store_true", help="write on behind end tokens")
    add("--repeats", type=int, default=2, help="texts of each prompt and method (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="of the peers (default: %(default)s)")
    add(
        "--output",
        type=measurements_file,
        help="file of measurements, a line of JSON each (.jsonl); tables (.txt) and summary (.json) go beside it",
    )
    add("--resume", action="store_true", help="go on with the measurements in --output")
    return made


def start_engines(options: argparse.Namespace, engines: list[EngineProcess]) -> None:
    """Add what the options name to `engines`, each stopped until it is asked."""
    threads = str(options.threads)
    engines.append(
        EngineProcess("paceline", [sys.executable, "-m", "tests.tools.peers.run_paceline", str(options.bundle)])
    )
    rows = (
        ("llama.cpp", "llama_cpp", options.llama_cpp, 1, [threads]),
        ("openvino", "openvino", options.openvino, 2, [threads]),
        ("genai", "genai", options.genai, 2, [threads, "as-built"]),
        ("genai-tuned", "genai", options.genai_tuned, 2, [threads, "tuned"]),
    )
    for name, adapter, given, count, more in rows:
        if given is None:
            continue
        python, *paths = given.split(":")
        if len(paths) != count:
            raise EngineError(f"--{name.replace('.', '-')} needs a Python and {count} paths, by colons; got {given!r}.")
        engines.append(EngineProcess(name, adapter_command(python, adapter, [*paths, *more])))


def open_methods(
    engines: list[EngineProcess], patterns: list[str], warm_up: dict[str, Any]
) -> dict[str, EngineProcess]:
    """Load every method that matches a pattern, and run it once; those that fail are named and left out."""
    opened = {}
    for engine in engines:
        for mode in engine.methods:
            method = f"{engine.name}:{mode}"
            if any(fnmatch.fnmatchcase(method, pattern) for pattern in patterns):
                try:
                    engine.open(mode)
                    engine.run(mode, **warm_up)
                    opened[method] = engine
                except EngineError as error:
                    print(f"left out: {method}: {error}", file=sys.stderr)
    if not opened:
        raise EngineError(f"No method is left: --methods {','.join(patterns)} matches none that runs.")
    return opened


def all_prompts(options: argparse.Namespace) -> list[Prompt]:
    prompts = []
    if options.humaneval:
        prompts += human_eval(options.humaneval, options.num_code) + edits(options.humaneval, options.num_edits)
    if options.spec_bench:
        prompts += spec_bench(options.spec_bench, options.per_category)
    if options.demo:
        prompts += [Prompt(prompt.name, f"demo: {prompt.name}", prompt.text) for prompt in PROMPTS]
    if not prompts:
        raise EngineError("There are no prompts: give --humaneval FILE, --spec-bench FILE, or --demo.")
    return prompts


def read(path: Path) -> list[dict[str, Any]]:
    """The measurements of a file; a last line that was cut off is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a line that is no JSON is left out", file=sys.stderr)
    return [one for one in found if "method" in one]


def key(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["prompt"], one["method"], one["sampling"], one["repeat"]


def measure(
    options: argparse.Namespace, engines: list[EngineProcess], done: set[tuple[Any, ...]], write: Callable[[Any], None]
) -> None:
    tokenizer = Tokenizer.from_bundle(Bundle.open(options.bundle))
    settings = {"temperature": options.temperature, "top_p": options.top_p, "ignore_end": options.ignore_end}
    sampling = f"temperature {options.temperature:g}, top-p {options.top_p:g}" if options.temperature else "greedy"
    prompts = [
        (prompt, ids)
        for prompt in all_prompts(options)
        if len(ids := tokenizer.encode_chat([{"role": "user", "content": prompt.text}])) <= options.longest_prompt
    ]
    if not prompts:
        raise EngineError(f"Every prompt has more than --longest-prompt {options.longest_prompt} tokens.")
    common: dict[str, Any] = {**settings, "end_ids": list(tokenizer.eos_token_ids)}
    warm_up = {**common, "prompt_ids": prompts[0][1], "seed": options.seed, "max_new_tokens": _WARM_UP_TOKENS}
    methods = open_methods(engines, options.methods.split(","), warm_up)
    memory = {engine.name: engine.resident_bytes() for engine in engines}
    versions = {engine.name: engine.versions for engine in engines}
    write({"machine": machine(), "versions": versions, "resident_bytes": memory, "settings": vars(options)})
    for repeat in range(options.repeats):
        for index, (prompt, ids) in enumerate(prompts):
            turn = index % len(methods)
            order = [*list(methods)[turn:], *list(methods)[:turn]]
            for method in order if repeat % 2 == 0 else reversed(order):
                one: dict[str, Any] = {"prompt": prompt.name, "category": prompt.category, "method": method}
                one |= {"sampling": sampling, "repeat": repeat, "prompt_tokens": len(ids)}
                if key(one) in done:
                    continue
                seed = options.seed + repeat if options.seed >= 0 else options.seed
                asked = {**common, "prompt_ids": ids, "seed": seed, "max_new_tokens": options.max_new_tokens}
                try:
                    figures = methods[method].run(method.partition(":")[2], **asked)
                except EngineError as error:
                    print(f"left out: {prompt.name}, {method}: {error}", file=sys.stderr)
                    continue
                one |= {"new_tokens": len(figures["token_ids"]), **figures}
                write(one)
                ms = 1000 * one["decode_s"] / max(one["new_tokens"] - one["first_tokens"], 1)
                print(f"{repeat} {prompt.name:28} {method:28} {one['new_tokens']:4} tokens {ms:6.1f} ms", flush=True)


def report(path: Path) -> None:
    measurements = read(path)
    summary = summarise(measurements)
    text = tables(summary)
    path.with_suffix(_SUMMARY).write_text(
        json.dumps({"summary": summary, "measurements": measurements}, indent=1) + "\n", encoding="utf-8"
    )
    path.with_suffix(_TABLES).write_text(text + "\n", encoding="utf-8")
    print(text)


def main() -> int:
    options = parser().parse_args()
    if options.report:
        report(options.report)
        return 0
    if options.bundle is None or options.output is None:
        parser().error("--bundle and --output are needed, or --report alone")
    if options.output.exists() and not options.resume:
        parser().error(f"{options.output} exists: go on with --resume, or name another file")
    done = {key(one) for one in read(options.output)} if options.resume and options.output.exists() else set()
    engines: list[EngineProcess] = []
    try:
        with options.output.open("a", encoding="utf-8") as file:
            if options.resume:
                file.write("\n")  # the last line may have been cut off

            def write(document: Any) -> None:
                file.write(json.dumps(document, default=str) + "\n")
                file.flush()

            start_engines(options, engines)
            measure(options, engines, done, write)
    except (EngineError, paceline.PacelineError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    finally:
        for engine in engines:
            engine.close()
    report(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
