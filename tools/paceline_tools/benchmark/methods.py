"""The ways of decoding that a benchmark compares."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.decoder import DEFAULT_VERIFICATION
from paceline.errors import InvalidInputError

__all__ = ["OURS", "PLAIN", "Method", "all_methods", "method_name"]

PLAIN = "plain"
OURS = "paceline"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode, at one temperature.

    Attributes:
        name: `plain`, `auto` or `K = …`, with a drafter and a rule that are not the default's; unique in its sampling.
        sampling: `greedy` or `temperature …`. Methods of one sampling are compared with its plain decoding.
        temperature: 0 is greedy.
        num_draft_tokens: as in `SpeculativeDecoder.generate`; 0 is plain decoding.
        drafter: as there; None is what the decoder takes.
        verification: the rule by which drafted tokens stand.
        engine: paceline, or a peer; then the three before say nothing, and the name begins with the peer's.
        mode: of a peer: `plain`, or `k…` with a draft.
        bundle: a label of `--beside`, with which the name begins; empty for the bundle that others are compared with.
    """

    name: str
    sampling: str
    temperature: float
    num_draft_tokens: int | str
    drafter: str | None
    verification: str
    engine: str = OURS
    mode: str = ""
    bundle: str = ""

    @property
    def fixed(self) -> int | None:
        """K where it is fixed and above 0."""
        return self.num_draft_tokens if isinstance(self.num_draft_tokens, int) and self.num_draft_tokens else None


def all_methods(
    num_draft_tokens: Iterable[int | str],
    drafters: Sequence[str],
    rules: Sequence[str],
    temperatures: Iterable[float],
    bundles: Sequence[str] = ("",),
) -> list[Method]:
    """Plain decoding, and every combination, by temperature and by bundle. What is named twice comes once.

    A hybrid drafter needs a plan, so fixed numbers of drafted tokens pass it over.

    Raises:
        InvalidInputError: a hybrid drafter, and nothing that is planned.
    """
    methods: dict[tuple[str, str], Method] = {}
    numbers = list(num_draft_tokens)
    if "hybrid" in drafters and "auto" not in numbers:
        raise InvalidInputError(
            "--drafter hybrid plans its drafts: add auto to --draft-tokens, or take another drafter."
        )
    ways: list[tuple[str, int | str, str | None, str]] = [(PLAIN, 0, None, DEFAULT_VERIFICATION)]
    for drafter, rule, k in itertools.product(drafters or (None,), rules or (DEFAULT_VERIFICATION,), numbers):
        if k != 0 and (drafter != "hybrid" or k == "auto"):
            ways.append((method_name(k, drafter, rule), k, drafter, rule))
    for temperature, bundle, (way, k, drafter, rule) in itertools.product(temperatures, bundles, ways):
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        name = f"{bundle}: {way}" if bundle else way
        methods[sampling, name] = Method(name, sampling, temperature, k, drafter, rule, bundle=bundle)
    return list(methods.values())


def method_name(num_draft_tokens: int | str, drafter: str | None, verification: str) -> str:
    """`auto` or `K = …`, with a drafter and a rule that are not the default's."""
    words = ["auto" if num_draft_tokens == "auto" else f"K = {num_draft_tokens}"]
    if drafter is not None:
        words.append(drafter)
    if verification != DEFAULT_VERIFICATION:
        words.append(f"{verification} rule")
    return ", ".join(words)
