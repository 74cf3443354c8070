"""Steps of several texts at once: where their code asks one model for a forward, one pass answers all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .kv_cache import KVCache
from .model import BatchedLM, Feed
from .strand import Strand

__all__ = ["Batchable", "Rendezvous"]

_T = TypeVar("_T")

# A text that feeds more tokens than these, as a prompt does, has a pass to itself: weights are then read for many rows
# anyway, and the others, who would wait for it, go first.
MOST_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A forward that a text waits for."""

    model: BatchedLM
    feed: Feed
    is_draft: bool


class Batchable:
    """A model whose forwards wait for those of other texts, where they are asked for in a `Rendezvous`.

    Elsewhere it is the model itself. Code that calls it must hold no lock that another text's code waits for.

    Attributes:
        inner: the model, which makes the caches.
    """

    def __init__(self, inner: BatchedLM, *, is_draft: bool = False) -> None:
        """Let forwards of `inner` meet; those of a draft model go first, since a target's pass ends a round."""
        self.inner = inner
        self._is_draft = is_draft

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.inner.vocab_size

    @property
    def logit_ids(self) -> NDArray[np.int64] | None:
        """The id that each logit stands for."""
        return self.inner.logit_ids

    @property
    def max_length(self) -> int:
        """Largest number of positions of a cache."""
        return self.inner.max_length

    @property
    def max_batch(self) -> int:
        """Most texts in one pass."""
        return self.inner.max_batch

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that a cache takes for each of its positions; 0 where the model does not tell."""
        return int(getattr(self.inner, "kv_bytes_per_position", 0))

    @property
    def prefill_rows(self) -> int | None:
        """Rows of a long prompt in one pass; None where the model does not tell."""
        return getattr(self.inner, "prefill_rows", None)

    def new_cache(self, max_length: int) -> KVCache:
        """Make an empty cache; see `CausalLM.new_cache`."""
        return self.inner.new_cache(max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens`, perhaps in one pass with other texts; see `CausalLM.forward`."""
        strand = Strand.current()
        if strand is None:
            return self.inner.forward(tokens, cache, num_logits)
        before = cache.seconds
        try:
            logits: NDArray[np.float32] = strand.ask(
                _Question(self.inner, Feed(tokens, cache, num_logits), self._is_draft)
            )
        finally:
            strand.others_s -= cache.seconds - before  # this text's own share of what it waited for
        return logits


class Rendezvous:
    """Runs steps of several texts, one after the other, until each waits for a model or has ended; then a pass.

    Nothing depends on how threads happen to be scheduled: one runs at a time, and texts are taken in their order. Where
    one waits for a draft model, the draft's waiters have the next pass, so that targets wait until all have drafted.

    Attributes:
        passes: runs of models so far.
        pass_texts: texts in them.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.pass_texts = 0
        self._strands: list[Strand] = []

    def play(self, tasks: Sequence[Callable[[], _T]]) -> Iterator[tuple[int, _T]]:
        """Run all tasks; the index of each and what it returned, as they end.

        The iterator must be used up. What a task raises is raised here, and ends them all; they should not.
        """
        while len(self._strands) < len(tasks):
            self._strands.append(Strand(f"paceline-text-{len(self._strands)}"))
        waiting: dict[int, _Question] = {}

        def ended(index: int, question: _Question | None) -> Iterator[tuple[int, _T]]:
            if question is not None:
                waiting[index] = question
            else:
                yield index, self._strands[index].result()

        for index, task in enumerate(tasks):
            yield from ended(index, self._strands[index].begin(task))
        while waiting:
            chosen = _choose(waiting)
            for index, (logits, error) in zip(chosen, self._run([waiting.pop(i) for i in chosen]), strict=True):
                yield from ended(index, self._strands[index].answer(logits, error))

    def stop(self) -> None:
        """End the threads; no task must be running."""
        for strand in self._strands:
            strand.stop()
        self._strands.clear()

    def _run(self, questions: Sequence[_Question]) -> list[tuple[Any, Exception | None]]:
        """One pass, or where it cannot be as many as there are questions: each has its own answer or error."""
        self.passes += 1
        self.pass_texts += len(questions)
        model = questions[0].model
        if len(questions) > 1:
            try:
                return [(logits, None) for logits in model.forward_all([question.feed for question in questions])]
            except Exception:  # of one of them: no cache has grown, so each can be asked for alone
                self.passes += len(questions) - 1
        answers: list[tuple[Any, Exception | None]] = []
        for question in questions:
            feed = question.feed
            try:
                answers.append((model.forward(feed.tokens, feed.cache, feed.num_logits), None))
            except Exception as error:  # whatever it is, it ends this text alone
                answers.append((None, error))
        return answers


def _choose(waiting: dict[int, _Question]) -> list[int]:
    """Who has the next pass: the draft model's waiters first; whoever has many rows alone, and last."""
    few = {index: question for index, question in waiting.items() if len(question.feed.tokens) <= MOST_ROWS}
    if not few:
        return [min(waiting)]
    model = few[min(few, key=lambda index: (not few[index].is_draft, index))].model
    return sorted(index for index, question in few.items() if question.model is model)[: model.max_batch]
