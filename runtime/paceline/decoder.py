"""The decoder: a target model, maybe a draft model, and how to start a generation with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .constraint import Constraint, ConstraintMasks
from .costs import Costs, CostsByLength
from .drafters import (
    DRAFTERS,
    CheckedDrafter,
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    PromptLookupDrafter,
    TextDrafter,
)
from .errors import ContextLengthError, InvalidInputError, shown
from .generation import Generation
from .model import CausalLM
from .planner import MOST_DRAFT_TOKENS, Planner
from .prefix_cache import GenerationCaches, PrefixCache
from .rounds import PlayRound, play_round
from .row_sampler import RowSampler
from .sampling import SamplingParams, plain_number, token_indices
from .stopping import Cutter
from .streams import Streams
from .tokenizer import Tokenizer, check_text
from .translated import TranslatedCache, TranslatedModel
from .verify import VERIFICATION_RULES

if TYPE_CHECKING:
    from .ort_sampler import SamplerGraphs

__all__ = ["DEFAULT_VERIFICATION", "SpeculativeDecoder", "goes_on_with_text"]

# Where nothing plans: with sampler graphs.
_UNPLANNED_DRAFT_TOKENS = 3
DEFAULT_VERIFICATION = "block"


@dataclass(frozen=True, slots=True)
class SpeculativeDecoder:
    """Generates text of the target model, with fewer target passes than tokens when something drafts for it.

    It holds no state of a running generation: any number may run at once, from several threads.

    Attributes:
        target: the model whose text this is.
        draft: the model that drafts, or None.
        tokenizer: None generates from ids to ids, without text and stop strings.
        vocab_size: ids `0 … vocab_size - 1` can be read and emitted; wider logits are cut (padding), in plain
            decoding as well.
        eos_token_ids: ids that end a text.
        graphs: sample and verify with these graphs instead of numpy; both models must be ONNX Runtime's.
        costs: of the models' runs, which drafts are planned by; None measures them in each generation's first rounds.
            `paceline.load` takes them from the profile that `paceline tune` stored.
        prefixes: keeps keys and values of finished texts, so that a prompt that begins like one of them skips that
            part of its prefill; None keeps nothing.
        max_draft_tokens: most drafted tokens that a round may have; None is any number. Engines are built for some.

    Raises:
        InvalidInputError: the target has fewer logits than `vocab_size`, or an end token lies outside.
    """

    target: CausalLM
    draft: CausalLM | None
    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    graphs: SamplerGraphs | None = None
    costs: Costs | CostsByLength | None = None
    prefixes: PrefixCache | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, model in (("target", self.target), ("draft", self.draft)):
            if model is None and name == "draft":
                continue
            if not all(
                hasattr(model, part) for part in ("vocab_size", "logit_ids", "max_length", "new_cache", "forward")
            ):
                raise InvalidInputError(f"{name} must be a model as paceline.CausalLM says, got {shown(model)}.")
        if not _is_int(self.vocab_size):
            raise InvalidInputError(f"vocab_size must be an integer, got {shown(self.vocab_size)}.")
        if self.target.logit_ids is not None:
            raise InvalidInputError(
                "The target must have a logit for every id, but it has logit_ids; it can only draft."
            )
        if not 1 <= self.vocab_size <= self.target.vocab_size:
            raise InvalidInputError(
                f"vocab_size must be between 1 and the target's {self.target.vocab_size} logits, got {self.vocab_size}."
            )
        object.__setattr__(self, "eos_token_ids", self._ids(self.eos_token_ids, "eos_token_ids"))

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        max_new_tokens: int = 256,
        num_draft_tokens: int | str = "auto",
        stop_token_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        drafter: Drafter | str | None = None,
        draft_sampling: SamplingParams | None = None,
        verification: str = DEFAULT_VERIFICATION,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        request: int = 0,
    ) -> Generation:
        """Start a generation. Arguments are checked here; nothing runs before the first step is asked for.

        Args:
            prompt: text, or token ids.
            sampling: how the target's tokens are drawn; greedy by default.
            max_new_tokens: at least 1. A text that fills the target's context ends earlier, with "length".
            num_draft_tokens: tokens to draft per round; 0 is plain decoding. "auto" plans each round for the most
                tokens per second. A text with a seed is planned by `costs`, or by assumed ones, never by the clock, so
                that it comes again; other texts by `costs`, or by what their first rounds take. With sampler graphs,
                which do not ask, "auto" is 3.
            stop_token_ids: further ids that end the text, like `eos_token_ids`.
            stop: strings that end the text; it is cut just before the first of them.
            drafter: "draft-model"; "prompt-lookup", which copies what followed the same words before; "hybrid", which
                copies or drafts, whichever is expected to bring more; or a drafter of your own, which must be new, and
                serves this generation only. None is "hybrid" where drafts are planned, else "draft-model".
            draft_sampling: how the draft model's tokens are drawn, the target's way by default. It changes the
                acceptance rate, not the law of the text.
            verification: the rule for drafts with probabilities, "token" or "block"; both keep the target's law.
            constraint: says which ids may follow the new text so far; see `paceline.constraint.Constraint`.
            logprobs: give the logprob of every emitted token, and of so many most probable ones; None gives none.
            request: 0 to 2**64 - 1, tells generations with the same seed apart.

        Raises:
            ContextLengthError: the prompt leaves no room in the target's context.
            InvalidInputError: an argument out of its range, one that cannot be honoured, or two that contradict each
                other.
        """
        if not isinstance(sampling, SamplingParams):
            raise InvalidInputError(f"sampling must be SamplingParams, got {shown(sampling)}.", "sampling")
        max_new_tokens, num_draft_tokens = plain_number(max_new_tokens), plain_number(num_draft_tokens)
        logprobs, request = plain_number(logprobs), plain_number(request)
        if not _is_int(max_new_tokens) or max_new_tokens < 1:
            raise InvalidInputError(
                f"max_new_tokens must be an integer of at least 1, got {shown(max_new_tokens)}.", "max_new_tokens"
            )
        has_drafter = drafter is not None or self.draft is not None
        self._check_num_draft_tokens(num_draft_tokens, has_drafter)
        planned = num_draft_tokens == "auto" and has_drafter and self.graphs is None
        self._check_drafter(drafter, planned=planned)
        most = MOST_DRAFT_TOKENS if self.max_draft_tokens is None else min(self.max_draft_tokens, MOST_DRAFT_TOKENS)
        if isinstance(num_draft_tokens, str):
            num_draft_tokens = 0 if planned or not has_drafter else min(_UNPLANNED_DRAFT_TOKENS, most)
        if draft_sampling is not None:
            self._check_draft_sampling(draft_sampling, drafter)
        stop = self._stop_strings(stop)
        stop_ids = frozenset((*self.eos_token_ids, *self._ids(stop_token_ids, "stop_token_ids")))
        if not isinstance(verification, str) or verification not in VERIFICATION_RULES:
            raise InvalidInputError(
                f"verification must be one of {', '.join(map(repr, VERIFICATION_RULES))}, got {shown(verification)}.",
                "verification",
            )
        if constraint is not None and not callable(constraint):
            raise InvalidInputError(
                f"constraint must be a function from new tokens to a mask, got {shown(constraint)}.", "constraint"
            )
        if logprobs is not None and (not _is_int(logprobs) or not 0 <= logprobs <= self.vocab_size):
            raise InvalidInputError(
                f"logprobs must be None or an integer from 0 to {self.vocab_size}, got {shown(logprobs)}.", "logprobs"
            )
        for name in ("min_new_tokens", "forced_token_ids"):
            value = getattr(sampling, name)
            asked = value if isinstance(value, int) else len(value)
            if asked > max_new_tokens:
                raise InvalidInputError(
                    f"{name} asks for {asked} new tokens, but max_new_tokens is {max_new_tokens}; change one of them.",
                    name,
                )
        if sampling.min_new_tokens and stop_ids & set(sampling.forced_token_ids[: sampling.min_new_tokens]):
            raise InvalidInputError(
                f"forced_token_ids ends the text before min_new_tokens={sampling.min_new_tokens}; change one of them.",
                "forced_token_ids",
            )
        streams = Streams.from_seed(sampling.seed, request)

        prompt_ids = self._prompt_ids(prompt)
        # The text never outgrows the cache: prompt and new tokens together have at most this many positions.
        cache_length = min(self.target.max_length, len(prompt_ids) + max_new_tokens)
        cutter = Cutter(
            limit=cache_length - len(prompt_ids),
            stop_token_ids=stop_ids,
            stop=stop,
            stream=self.tokenizer.stream() if self.tokenizer else None,
            min_tokens=sampling.min_new_tokens,
        )
        masks = ConstraintMasks(constraint, self.vocab_size) if constraint else None

        def row_sampler(params: SamplingParams) -> RowSampler:
            return RowSampler(
                params,
                vocab_size=self.vocab_size,
                num_prompt_tokens=len(prompt_ids),
                end_token_ids=stop_ids,
                masks=masks,
            )

        try:
            draft_sampler = row_sampler(draft_sampling or sampling)
        except InvalidInputError as error:
            if not draft_sampling:
                raise
            raise InvalidInputError(f"draft_sampling: {error}", "draft_sampling") from error
        planner = None
        if planned:
            planner = Planner(
                costs=self.costs,
                asks=drafter in (None, "draft-model", "hybrid"),
                copies=drafter == "prompt-lookup",
                repeatable=sampling.seed is not None,
                most=most,
                max_new_tokens=max_new_tokens,
            )
        play: PlayRound = play_round
        caches = GenerationCaches(prompt_ids, cache_length, self.prefixes)
        new_drafter = self._new_drafter(drafter, draft_sampler, caches, planner, drawn=draft_sampling is not None)
        if self.graphs is not None:
            from .ort_round import check_graph_arguments, graph_rounds

            check_graph_arguments(
                sampling, draft_sampler.params, drafter=drafter, constraint=constraint, logprobs=logprobs
            )
            play, new_drafter = graph_rounds(self.graphs, self.draft, sampling, draft_sampler, prompt_ids, caches)
        if not planner and not num_draft_tokens:
            new_drafter = None
        kv_bytes = caches.num_bytes(self.target)
        if new_drafter and self.draft and drafter in (None, "draft-model", "hybrid"):
            kv_bytes += caches.num_bytes(self.draft)
        return Generation(
            prompt_ids,
            target=self.target,
            caches=caches,
            kv_bytes=kv_bytes,
            new_drafter=new_drafter,
            sampler=row_sampler(sampling),
            num_draft_tokens=num_draft_tokens,
            rule=verification,
            vocab_size=self.vocab_size,
            cutter=cutter,
            chance=streams,
            num_top_logprobs=logprobs,
            play=play,
            planner=planner,
        )

    def _new_drafter(
        self,
        drafter: Drafter | str | None,
        sampler: RowSampler,
        caches: GenerationCaches,
        planner: Planner | None,
        *,
        drawn: bool,
    ) -> Callable[[], Drafter] | None:
        draft = self.draft
        if drafter is not None and not isinstance(drafter, str):
            checked = CheckedDrafter(drafter, self.vocab_size)
            return lambda: checked
        if drafter == "prompt-lookup":
            return PromptLookupDrafter
        if draft is None:
            return None

        def new_drafter() -> Drafter:
            model: DraftModelDrafter | TextDrafter
            cache = caches.new(draft)
            # Text takes no notice of penalties and masks, nor of how its tokens should be drawn.
            if goes_on_with_text(draft) and sampler.leaves_logits_alone and not drawn:
                model = TextDrafter(cast(TranslatedModel, draft), cast(TranslatedCache, cache), planner)
            else:
                model = DraftModelDrafter(draft, cache, sampler, self.vocab_size, planner=planner)
            return HybridDrafter(model, planner) if planner and drafter in (None, "hybrid") else model

        return new_drafter

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError("This decoder has no tokenizer; give the prompt as token ids.", "prompt")
            check_text(prompt, "prompt")
            prompt = self.tokenizer.encode(prompt)
        ids = list(self._ids(prompt, "prompt"))
        if not ids:
            raise InvalidInputError("The prompt is empty; the model needs at least one token to go on from.", "prompt")
        if len(ids) >= self.target.max_length:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens, but the target model's context holds {self.target.max_length} and "
                "needs room for at least one new token; shorten the prompt or export with a larger --max-length.",
                "prompt",
            )
        return ids

    def _check_drafter(self, drafter: Drafter | str | None, *, planned: bool) -> None:
        if not isinstance(drafter, str):
            return
        if drafter not in DRAFTERS:
            raise InvalidInputError(
                f"drafter must be one of {', '.join(map(repr, DRAFTERS))}, got {shown(drafter)}.", "drafter"
            )
        if drafter != "prompt-lookup" and self.draft is None:
            raise InvalidInputError(
                f"drafter={shown(drafter)} needs a draft model, which this decoder lacks: use 'prompt-lookup', or "
                "export the bundle with --draft.",
                "drafter",
            )
        if drafter == "hybrid" and not planned:
            raise InvalidInputError(
                "drafter='hybrid' plans its drafts: leave num_draft_tokens at 'auto', in numpy.", "drafter"
            )

    def _check_num_draft_tokens(self, num_draft_tokens: int | str, has_drafter: bool) -> None:
        if num_draft_tokens == "auto":
            return
        if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 0:
            raise InvalidInputError(
                "num_draft_tokens must be 'auto' or an integer of at least 0 (0 is plain decoding), got "
                f"{shown(num_draft_tokens)}.",
                "num_draft_tokens",
            )
        if num_draft_tokens and not has_drafter:
            raise InvalidInputError(
                f"num_draft_tokens={shown(num_draft_tokens)}, but there is nothing to draft with: use 0 for plain "
                "decoding, export a draft model into the bundle, or pass a drafter.",
                "num_draft_tokens",
            )
        if self.max_draft_tokens is not None and num_draft_tokens > self.max_draft_tokens:
            raise InvalidInputError(
                f"num_draft_tokens={shown(num_draft_tokens)}, but the target's engine was built for at most "
                f"{self.max_draft_tokens}; use fewer, or build it with a larger --max-draft-tokens.",
                "num_draft_tokens",
            )
        if num_draft_tokens and num_draft_tokens + 1 > self.target.max_length:
            raise InvalidInputError(
                f"num_draft_tokens={shown(num_draft_tokens)} needs one position more in a round, but the target "
                f"model's cache has {self.target.max_length}; use at most {self.target.max_length - 1}.",
                "num_draft_tokens",
            )

    def _check_draft_sampling(self, draft_sampling: SamplingParams, drafter: Drafter | str | None) -> None:
        if not isinstance(draft_sampling, SamplingParams):
            raise InvalidInputError(
                f"draft_sampling must be SamplingParams, got {shown(draft_sampling)}.", "draft_sampling"
            )
        if drafter not in (None, "draft-model", "hybrid") or self.draft is None:
            raise InvalidInputError(
                "draft_sampling is for the draft model, which does not draft here; leave it out.", "draft_sampling"
            )
        if draft_sampling.seed is not None:
            raise InvalidInputError(
                "draft_sampling takes no seed: `sampling.seed` keys all streams of a generation.", "draft_sampling"
            )

    def _stop_strings(self, stop: Sequence[str]) -> tuple[str, ...]:
        if not isinstance(stop, Sequence) or isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidInputError(
                f"stop must be a sequence of strings that are not empty, got {shown(stop)}.", "stop"
            )
        if stop and self.tokenizer is None:
            raise InvalidInputError(
                "Stop strings need a tokenizer, which this decoder lacks; use stop_token_ids.", "stop"
            )
        for text in stop:
            check_text(text, "stop")
        return tuple(stop)

    def _ids(self, values: Iterable[Any], name: str) -> tuple[int, ...]:
        try:
            ids = token_indices(values)
        except TypeError as error:
            text = "text or " if name == "prompt" else ""
            raise InvalidInputError(f"{name} must be {text}integer token ids, got {shown(values)}.", name) from error
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidInputError(
                    f"{name} holds id {shown(token_id)}, outside the vocabulary of {self.vocab_size} ids (0 to "
                    f"{self.vocab_size - 1}).",
                    name,
                )
        return ids


def goes_on_with_text(draft: CausalLM | None) -> bool:
    """Whether a draft model has a tokenizer of its own, and drafts by its text wherever it can."""
    return isinstance(draft, TranslatedModel) and draft.method == "text"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
