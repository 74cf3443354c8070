"""Table 1 and Figure 1 of arXiv 2302.01318 (Chen et al. 2023) with a bundle of the user's: `paceline bench --paper`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import SamplingParams
from paceline.errors import InvalidInputError
from paceline_tools.progress import stages

from .document import Document, MeasuredPrompt, SkippedPrompt
from .loaded import Loaded, gather, hold_signals, say_broken
from .measurement import Failure, Measurement, Plan, measure
from .meters import EnergyMeter
from .methods import all_methods
from .paper_document import Answer, PaperDocument, Part
from .prompts import spread
from .runner import check, encoded
from .solutions import run_program
from .tasks import Task, read_task

__all__ = ["run_paper"]

# Of curves: as many as show the shape of a text's decoding.
_CURVE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Job:
    """One part that is going to be measured."""

    task: Task
    stage: str
    plan: Plan
    prompts: tuple[MeasuredPrompt, ...]
    ids: tuple[list[int], ...]
    skipped: tuple[SkippedPrompt, ...]

    @property
    def size(self) -> int:
        """Tokens at most, for the progress."""
        return len(self.ids) * len(self.plan.methods) * self.plan.repeats * self.plan.max_new_tokens


def run_paper(
    folder: Path,
    *,
    prompts: tuple[str, ...],
    limit: int | None,
    per_category: int | None,
    raw: bool,
    draft_tokens: tuple[int | str, ...],
    drafters: tuple[str, ...],
    rules: tuple[str, ...],
    curve: tuple[int, ...],
    curve_prompts: int,
    run_code: bool,
    seed: int | None,
    max_new_tokens: int | None,
    repeats: int,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
) -> tuple[PaperDocument, BaseException | None]:
    """Load a bundle, write all texts and judge them; the arguments are the options of `paceline bench --paper`.

    Returns:
        What was measured, and what ended the run early, if anything did: then the document is not complete.

    Raises:
        PacelineError: an argument that cannot be honoured, before anything is measured.
        BaseException: Ctrl-C or a fault before there was a text.
    """
    tasks = [read_task(source, raw=raw, limit=limit, count=per_category, run_code=run_code) for source in prompts]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"--prompts names a task of --paper twice ({', '.join(names)}); take one file of each.")
    table = [_table_plan(task, draft_tokens, drafters, rules, seed, repeats, max_new_tokens) for task in tasks]
    curves = [
        replace(plan, methods=tuple(all_methods(curve, (), (), (task.temperature, 0.0))))
        for task, plan in zip(tasks, table, strict=True)
        if curve
    ]
    if seed is not None:
        SamplingParams(seed=seed + repeats - 1)  # the last repeat's, said before anything is loaded
    shut_in = run_program("pass").shut_in if run_code else None
    loaded = Loaded.load(folder, provider, threads, profile, engine_folder)
    jobs = [_job(loaded, task, "table", plan, raw) for task, plan in zip(tasks, table, strict=True)]
    for job, plan in zip(list(jobs), curves, strict=False):
        shorter = replace(plan, max_new_tokens=min(_CURVE_TOKENS, plan.max_new_tokens))
        chosen = spread(list(zip(job.prompts, job.ids, strict=True)), curve_prompts)
        kept, ids = zip(*chosen, strict=True)
        jobs.append(Job(job.task, "curves", shorter, kept, ids, ()))
    for job in jobs:
        for method in job.plan.methods:
            check(loaded.decoder, method, job.plan, job.ids[0])

    found: list[tuple[int, Measurement, str]] = []
    begun, started = datetime.datetime.now(datetime.UTC), time.perf_counter()
    with stages() as on_progress:
        broken = gather(_measured(loaded, jobs, on_progress), found)
    seconds = time.perf_counter() - started
    if broken:
        say_broken(broken, bool(found))
    answers, stopped = _judged(jobs, found)
    hold_signals()
    broken = broken or stopped
    settings = {
        "prompts": list(prompts),
        "limit": limit,
        "per_category": per_category,
        "raw": raw,
        "max_new_tokens": max_new_tokens or max(plan.max_new_tokens for plan in table),
        "repeats": repeats,
        "seed": seed,
        "curve": list(curve),
        "curve_prompts": curve_prompts,
        "run_generated_code": run_code,
        "provider": provider,
        "threads": threads,
        "profile": profile,
    }
    run = {**loaded.run(begun, seconds, broken, settings, {}), "shut_in": shut_in and dict(shut_in)}
    parts = []
    for index, job in enumerate(jobs):
        measurements = tuple(one for where, one, _ in found if where == index)
        of_part = {
            "temperature": job.task.temperature,
            "top_p": job.task.top_p,
            "max_new_tokens": job.plan.max_new_tokens,
        }
        document = Document(
            {**run, "settings": {**settings, **of_part}}, job.plan.methods, job.prompts, job.skipped, measurements
        )
        if measurements:
            parts.append(Part(job.task.name, job.stage, job.task.metric, of_part, document, tuple(answers[index])))
    return PaperDocument(run, tuple(parts)), broken


def _table_plan(
    task: Task,
    draft_tokens: Sequence[int | str],
    drafters: Sequence[str],
    rules: Sequence[str],
    seed: int | None,
    repeats: int,
    max_new_tokens: int | None,
) -> Plan:
    methods = all_methods(draft_tokens, drafters, rules, (task.temperature, 0.0))
    knobs = SamplingParams(top_p=task.top_p)
    longest = max_new_tokens or task.max_new_tokens
    return Plan(tuple(methods), longest, repeats, knobs, seed, ignore_end=False, stop=task.stop)


def _job(loaded: Loaded, task: Task, stage: str, plan: Plan, raw: bool) -> Job:
    kept, ids, skipped = encoded(loaded.decoder, task.prompts, raw, plan.max_new_tokens, loaded.context)
    return Job(task, stage, plan, tuple(kept), tuple(ids), tuple(skipped))


def _measured(
    loaded: Loaded, jobs: Sequence[Job], on_progress: Callable[[str, float], None]
) -> Iterator[tuple[int, Measurement, str]]:
    """Every text: its part, what it took, and what it says."""
    whole = sum(job.size for job in jobs)
    done = 0
    meter = EnergyMeter(gpu=not loaded.on_host)
    for index, job in enumerate(jobs):
        texts: list[str] = []

        def progress(stage: str, fraction: float, *, job: Job = job, done: int = done) -> None:
            on_progress(f"{job.task.name}, {job.stage}: {stage}", (done + fraction * job.size) / whole)

        def keep(one: Measurement, text: str, *, texts: list[str] = texts) -> None:
            texts.append(text)

        for one in measure(loaded.decoder, job.ids, job.plan, meter, {}, progress, keep):
            assert not isinstance(one, Failure)  # of peers alone
            yield index, one, texts[-1]
        done += job.size


def _judged(
    jobs: Sequence[Job], found: Sequence[tuple[int, Measurement, str]]
) -> tuple[list[list[Answer]], BaseException | None]:
    """The answers of each part; those that Ctrl-C or SIGTERM left are not judged."""
    answers: list[list[Answer]] = [[] for _ in jobs]
    stopped: BaseException | None = None
    in_tables = [entry for entry in found if jobs[entry[0]].stage == "table"]
    with stages() as on_progress:
        for done, (index, one, text) in enumerate(in_tables):
            job = jobs[index]
            score, outcome = None, "not judged"
            try:
                on_progress("judging", done / len(in_tables))
                if stopped is None:
                    judgement = job.task.judges[job.prompts[one.prompt].name](text)
                    score, outcome = judgement.score, judgement.outcome
            except (KeyboardInterrupt, SystemExit) as error:
                stopped = error
            answers[index].append(Answer(one.prompt, one.method, one.repeat, text, score, outcome))
    return answers, stopped
