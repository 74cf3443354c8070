"""Constraints from JSON schemas, regular expressions and grammars; llguidance (`paceline[grammar]`) computes them.

This module knows nothing about models and sampling: it is one way to make a `paceline.constraint.Constraint`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from .errors import InstallationError, InvalidInputError, shown
from .tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarConstraint"]

# Rows of a round, and the one that the next round goes on from; a matcher grows with its text.
_REMEMBERED = 16
_REASON_LENGTH = 300
# Strings, regular expressions and comments, so that they are passed over whole, and names of tokens.
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|<[^<>\s]+>')

# llguidance reads a tokenizer in seconds, so each is read once. It lives as long as its tokenizer.
_llguidance_tokenizers: weakref.WeakKeyDictionary[Tokenizer, LLTokenizer] = weakref.WeakKeyDictionary()
_reading = threading.Lock()


class GrammarConstraint:
    """Allows the ids that keep the new text inside a grammar, and the end tokens where it is complete.

    A `paceline.constraint.Constraint`: its mask depends on the new text alone. Any number of generations may use one,
    also at once, but each remembers more of its own.

    Where the grammar leaves one way for the text to go on, llguidance's mask holds the single id that the tokenizer
    itself would write, so that it is emitted without drafting or drawing. Nothing else is forced: where a mask
    holds several ids, the model chooses among them, whether plain or speculative decoding asks.
    """

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        """Use a grammar in llguidance's variant of Lark.

        Quoted text and regular expressions speak of the text as it is decoded, whatever tokens it comes in: tags that
        are tokens of their own and stand in texts, such as Qwen's `<tool_call>`, are part of it, and special tokens are
        not. A name in angle brackets without quotes is one token, of either kind.

        Raises:
            InstallationError: llguidance is missing.
            InvalidInputError: llguidance refuses the grammar or the tokenizer, or the grammar allows no text.
        """
        _check_text(grammar, "grammar")
        if re.search(r"^[ \t]*[?!]*[\w.-]+\s*\[[^\]]*\btemperature\s*=", grammar, re.MULTILINE):
            raise InvalidInputError(
                "The grammar sets a temperature, which a constraint cannot; give it in SamplingParams for all tokens."
            )
        matcher = _llguidance()
        _check_tokenizer(tokenizer)
        self._start(tokenizer, matcher.grammar_from_lark(_with_ids(grammar, tokenizer)), "grammar")

    @classmethod
    def from_json_schema(cls, tokenizer: Tokenizer, schema: str | bool | Mapping[str, Any]) -> Self:
        """Allow JSON that a schema, given as text or parsed, accepts.

        Keywords that JSON Schema defines and llguidance does not implement raise; others are annotations, as the
        standard has it. The key `x-guidance` holds llguidance's options, for instance `whitespace_flexible`.

        Raises:
            InstallationError: llguidance is missing.
            InvalidInputError: no schema, one that no JSON satisfies, or one with keywords that are not supported.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            parsed = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"The JSON schema is no JSON: {error}.") from error
        if parsed is True:
            parsed, text = {}, "{}"
        if not isinstance(parsed, dict):
            raise InvalidInputError(f"A JSON schema must be an object, got {text:.80}.")
        check_guidance(parsed)
        _check_text(text, "JSON schema")
        # `lenient` would drop what is not supported.
        grammar = _llguidance().grammar_from_json_schema(text, overrides={"lenient": False})
        return cls._from_llguidance(tokenizer, grammar, "JSON schema")

    @classmethod
    def json_object(cls, tokenizer: Tokenizer) -> Self:
        """Allow any JSON object; raises as `from_json_schema` does."""
        return cls.from_json_schema(tokenizer, {"type": "object"})

    @classmethod
    def from_regex(cls, tokenizer: Tokenizer, pattern: str) -> Self:
        """Allow texts that match a regular expression from their first to their last character.

        The syntax is that of Rust's crate regex: no look-around and no references back.

        Raises:
            InstallationError: llguidance is missing.
            InvalidInputError: llguidance refuses the pattern, or it matches nothing.
        """
        _check_text(pattern, "regular expression")
        return cls._from_llguidance(tokenizer, _llguidance().grammar_from_regex(pattern), "regular expression")

    @classmethod
    def _from_llguidance(cls, tokenizer: Tokenizer, grammar: str, kind: str) -> Self:
        constraint = cls.__new__(cls)
        constraint._start(tokenizer, grammar, kind)
        return constraint

    def _start(self, tokenizer: Tokenizer, grammar: str, kind: str) -> None:
        matcher = _llguidance()(_llguidance_tokenizer(tokenizer), grammar, log_level=0)
        if matcher.is_error():
            raise InvalidInputError(f"The {kind} cannot be used: {_reason(matcher)}.")
        if warnings := matcher.get_grammar_warnings():
            raise InvalidInputError(f"The {kind} cannot be honoured in full: {'; '.join(warnings):.{_REASON_LENGTH}}.")
        self._kind = kind
        self._end_token_ids = frozenset(tokenizer.eos_token_ids)
        self._words = -(-tokenizer.vocab_size // 32)
        self._root = matcher
        # Matchers behind texts of late. llguidance's own rollback is not used: with 1.9.1, a matcher that was rolled
        # back and fed another text could allow what belongs to the old one.
        self._reached: OrderedDict[tuple[int, ...], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self(())

    def copy(self) -> Self:
        """The same constraint with a memory of its own, for another text at the same time; nothing is read anew."""
        other = type(self).__new__(type(self))
        other._kind, other._end_token_ids, other._words = self._kind, self._end_token_ids, self._words
        other._root, other._reached, other._lock = self._root.deep_copy(), OrderedDict(), threading.Lock()
        return other

    def __call__(self, new_tokens: Sequence[int]) -> NDArray[np.uint32] | None:
        """The bitmask `[ceil(vocab / 32)]` behind `new_tokens`; None behind a text that left the grammar or ended.

        Such a text can only be a draft that will not stand, whose continuation does not matter.

        Raises:
            InvalidInputError: the grammar leads nowhere from here, or it is too complex for llguidance.
        """
        text = tuple(new_tokens)
        with self._lock:
            matcher = self._matcher_behind(text)
            if matcher is None:
                return None
            found = np.frombuffer(matcher.compute_bitmask(), np.dtype("<u4"))
            if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
                self._reached.pop(text, None)
                raise self._stuck(matcher, len(text))
            mask = found[: self._words].astype(np.uint32)
            if not matcher.is_accepting():
                self._keep_from_ending(mask, len(text))
        return mask

    def _keep_from_ending(self, mask: NDArray[np.uint32], num_new_tokens: int) -> None:
        """Clear the bits of end tokens that a grammar asks for by their ids where its text is not complete."""
        for token_id in self._end_token_ids:
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if not mask.any():
            raise InvalidInputError(
                f"The {self._kind} asks for an end token behind {num_new_tokens} new tokens, where it is not complete; "
                "leave the token out: a text may end wherever the grammar is complete.",
                "constraint",
            )

    def _matcher_behind(self, text: tuple[int, ...]) -> LLMatcher | None:
        if not self._end_token_ids.isdisjoint(text):
            return None
        if text in self._reached:
            self._reached.move_to_end(text)
            return self._reached[text]
        known = max((one for one in self._reached if text[: len(one)] == one), key=len, default=())
        # The matcher it starts from stays where it is, for other drafts.
        matcher = self._reached.get(known, self._root).deep_copy()
        rest = list(text[len(known) :])
        if rest and matcher.try_consume_tokens(rest) < len(rest):
            if matcher.is_error():
                raise self._stuck(matcher, len(text))
            return None
        self._reached[text] = matcher
        if len(self._reached) > _REMEMBERED:
            self._reached.popitem(last=False)
        return matcher

    def _stuck(self, matcher: LLMatcher, num_new_tokens: int) -> InvalidInputError:
        return InvalidInputError(
            f"The {self._kind} allows no text to go on behind {num_new_tokens} new tokens ({_reason(matcher)}); "
            "change it so that some text is always left.",
            "constraint",
        )


def _llguidance() -> type[LLMatcher]:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InstallationError(
            f"Grammars need llguidance, which cannot be imported ({error}): pip install 'paceline[grammar]'."
        ) from error
    return LLMatcher


def _check_tokenizer(tokenizer: object) -> None:
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidInputError(f"tokenizer must be a paceline Tokenizer, got {tokenizer!r:.80}.")
    if not tokenizer.eos_token_ids:
        raise InvalidInputError("The tokenizer has no end token, so that no text could be complete under a grammar.")


def _llguidance_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    _check_tokenizer(tokenizer)
    from llguidance import LLTokenizer, TokenizerWrapper

    common: dict[str, Any] = {"n_vocab": tokenizer.vocab_size, "eos_token": list(tokenizer.eos_token_ids)}
    with _reading:
        if tokenizer not in _llguidance_tokenizers:
            try:
                read = LLTokenizer(tokenizer.to_json(), slices=[], **common)
            except ValueError as error:
                raise InvalidInputError(f"llguidance cannot read this tokenizer: {error}.") from error
            vocabulary = TokenizerWrapper(_Vocabulary(read, tokenizer))
            _llguidance_tokenizers[tokenizer] = LLTokenizer(vocabulary, **common)
        return _llguidance_tokenizers[tokenizer]


class _Vocabulary:
    """A tokenizer that llguidance has read, with those tokens special that texts do not show; see `TokenizerWrapper`.

    llguidance itself takes every added token in angle brackets for a special one, which text in a grammar never
    matches, and cuts text that a grammar forces by the tokenizer's own rule, which makes a special token of its name.
    """

    bos_token_id = None

    def __init__(self, read: LLTokenizer, tokenizer: Tokenizer) -> None:
        shown = {token_id for token_id in tokenizer.added_tokens.values() if not tokenizer.is_special(token_id)}
        ids = range(read.vocab_size)
        hidden = {token_id for token_id in ids if read.is_special_token(token_id)} - shown
        self._hidden = hidden | set(tokenizer.eos_token_ids)
        self._read = read
        self.eos_token_id = read.eos_token
        self.tokens = [read.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = sorted(self._hidden)
        names = sorted(self.tokens[token_id] for token_id in self._hidden)
        self._inside_names = re.compile(
            b"|".join(b"(?<=%s)(?=%s)" % (re.escape(name[:1]), re.escape(name[1:])) for name in names if name[1:])
        )

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text, none of which is hidden."""
        ids = self._read.tokenize_bytes(text)
        if self._hidden.isdisjoint(ids):
            return ids
        return [token_id for part in self._inside_names.split(text) for token_id in self._read.tokenize_bytes(part)]


def _with_ids(grammar: str, tokenizer: Tokenizer) -> str:
    """A grammar that names tokens which texts show by their ids: llguidance has names for special tokens only.

    Raises:
        InvalidInputError: it asks for an end token, which llguidance would take for the end of its text anywhere.
    """
    added = tokenizer.added_tokens

    def with_id(part: re.Match[str]) -> str:
        token_id = added.get(part[0])
        if token_id in tokenizer.eos_token_ids:
            raise InvalidInputError(
                f"The grammar asks for the end token {part[0]}; leave it out: a text may end wherever the grammar is "
                "complete.",
                "grammar",
            )
        return part[0] if token_id is None or tokenizer.is_special(token_id) else f"<[{token_id}]>"

    return _LARK_PARTS.sub(with_id, grammar)


def check_guidance(schema: Mapping[str, Any]) -> None:
    """Check that llguidance's options in a JSON schema are such; it checks their names and types itself.

    Raises:
        InvalidInputError: the key `x-guidance` holds no object.
    """
    if not isinstance(options := schema.get("x-guidance", {}), dict):
        raise InvalidInputError(
            f"The schema's key x-guidance holds {shown(options)}; an object with llguidance's options is expected."
        )


def _check_text(text: object, kind: str) -> None:
    if not isinstance(text, str):
        raise InvalidInputError(f"A {kind} must be text, got {text!r:.80}.")
    check_text(text, f"The {kind}")


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says, in one line: its first, with the regex parser's own verdict."""
    message = matcher.get_error().partition("<state>")[0].strip()
    first, _, rest = message.partition("\n")
    found = re.search(r"^error: (.*)", rest, re.MULTILINE)
    if not first and matcher.stop_reason().startswith("NoExtension"):
        return "nothing can stand here"
    return f"{first} {found[1]}"[:_REASON_LENGTH] if found else first[:_REASON_LENGTH] or matcher.stop_reason()
