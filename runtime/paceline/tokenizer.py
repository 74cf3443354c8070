"""Text to token ids and back: encoding, chat templates, and text that appears while tokens arrive."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from .bundle import Bundle, TokenizerEntry
from .errors import BundleError, InvalidInputError, shown

__all__ = ["TextStream", "Tokenizer", "check_text"]

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes and a token at least one: what lies further back is decided.
_UNDECIDED = 4
# Decoders treat a text's first piece in ways of their own, so a piece is decoded behind another one.
_ANCHOR = "x"
# How byte-fallback vocabularies write a byte that no piece of theirs covers.
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
# The character that a byte-level vocabulary (GPT-2's) writes for each byte: itself where printable, else from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


class Tokenizer:
    """The tokenizer of a bundle.

    Attributes:
        vocab_size: number of ids that have a text.
        bos_token_id: the id that a text begins with, or None.
        eos_token_ids: ids that end a text.
        chat_template: Jinja source, or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, entry: TokenizerEntry, chat_template: str | None = None) -> None:
        # A tokenizer.json may carry training settings; a prompt must be neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._entry = entry
        self._special_ids = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._is_byte_level = backend.decoder is not None and backend.decoder.decode(["Ġ"]) == " "
        self.vocab_size = entry.vocab_size
        self.bos_token_id = entry.bos_token_id
        self.eos_token_ids = entry.eos_token_ids
        self.chat_template = chat_template

    @classmethod
    def from_bundle(cls, bundle: Bundle, which: str = "target") -> Tokenizer:
        """Read the tokenizer of the `"target"`, with its chat template when there is one, or of the `"draft"`.

        Files that the manifest does not list are not read.

        Raises:
            BundleError: no `tokenizer.json`, or one that cannot be read.
        """
        own = bundle.manifest.draft_tokenizer if which == "draft" else None
        path = bundle.path("tokenizer.json" if own is None else own.path)
        template = path.with_name("chat_template.jinja")
        listed = bundle.has(template.relative_to(bundle.root).as_posix())
        return cls._read(path, template if listed else None, bundle.manifest.tokenizer_of(which))

    @classmethod
    def from_folder(cls, folder: str | Path, entry: TokenizerEntry) -> Tokenizer:
        """Read `tokenizer.json` and, when it exists, `chat_template.jinja` of a folder.

        Raises:
            BundleError: no `tokenizer.json`, or one that cannot be read.
        """
        template = Path(folder) / "chat_template.jinja"
        return cls._read(Path(folder) / "tokenizer.json", template if template.is_file() else None, entry)

    @classmethod
    def _read(cls, path: Path, template: Path | None, entry: TokenizerEntry) -> Tokenizer:
        if not path.is_file():
            raise BundleError(f"There is no tokenizer at {path}; export the bundle again.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise BundleError(f"{path} cannot be read as a tokenizer ({error}); export the bundle again.") from error
        try:
            chat_template = template.read_text(encoding="utf-8") if template else None
        except UnicodeDecodeError as error:
            raise BundleError(f"{template} is not UTF-8 ({error}); export the bundle again.") from error
        return cls(backend, entry, chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens that are written out in it become their ids.

        `add_special_tokens` adds what the tokenizer's post-processor puts around a text, for instance a first BOS.

        Raises:
            InvalidInputError: it is no string, or holds half a character.
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"The text must be a string, got {shown(text)}.")
        check_text(text, "The text")
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, without special tokens. Ids beyond the vocabulary have none, as a padded model's rows.

        Raises:
            InvalidInputError: what is given are no integers of at least 0.
        """
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=True)
        except (TypeError, OverflowError) as error:
            raise InvalidInputError(f"Token ids must be integers of at least 0, got {shown(token_ids)}.") from error

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`, for libraries that read one."""
        return self._backend.to_str()

    def stream(self) -> TextStream:
        """Start to decode tokens one by one."""
        return TextStream(self)

    def is_special(self, token_id: int) -> bool:
        """Whether this id has no text of its own."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to a running text, which need not be whole characters.

        A special token's are those of its name; an id without a token has none.
        """
        piece = self._backend.id_to_token(token_id) or ""
        if self.is_special(token_id):
            return piece.encode()
        if self._is_byte_level and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        if fallback := _FALLBACK.fullmatch(piece):
            return bytes.fromhex(fallback[1])
        decoder = self._backend.decoder
        # Without a decoder tokens are joined by spaces.
        text = decoder.decode([_ANCHOR, piece]) if decoder is not None else f"{_ANCHOR} {piece}"
        return str(text).removeprefix(_ANCHOR).encode() if piece else b""

    def byte_token(self, byte: int) -> int | None:
        """The id that stands for one byte alone, for characters cut in two; None where the vocabulary has none."""
        piece = _CHARACTER_OF[byte] if self._is_byte_level else f"<0x{byte:02X}>"
        found: int | None = self._backend.token_to_id(piece)
        return found

    def ids_by_bytes(self) -> dict[bytes, int]:
        """An id for every string of bytes that a token adds to a text, special tokens left out.

        Where several add the same, it is the lowest id, but one that is no byte-fallback's.
        """
        found: dict[bytes, int] = {}
        fallbacks: dict[bytes, int] = {}
        for token_id in range(self.vocab_size):
            piece = self._backend.id_to_token(token_id)
            if piece and not self.is_special(token_id) and (data := self.token_bytes(token_id)):
                (fallbacks if _FALLBACK.fullmatch(piece) else found).setdefault(data, token_id)
        return fallbacks | found

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are taken out of a text before it is split, special ones among them, by their text."""
        return {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def opening_ids(self) -> list[int]:
        """What the post-processor puts in front of a text, for instance a first BOS."""
        whole, bare = (self.encode(_ANCHOR, add_special_tokens=special) for special in (True, False))
        starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text` without added special tokens, and the characters that each covers, from and to.

        Tokens that share a character cover all of it.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Render messages with the chat template, up to where the assistant answers.

        Args:
            messages: mappings with at least `role` and `content`.
            tools: functions that the assistant may call, as OpenAI's API describes them. A template that knows nothing
                of tools leaves them out.

        Raises:
            BundleError: the template cannot be parsed.
            InvalidInputError: the bundle has no template, no message is given, or the template refuses them.
        """
        if self.chat_template is None:
            raise InvalidInputError(
                "This bundle has no chat template, so its model was probably not made for chats; give a plain prompt."
            )
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise InvalidInputError(
                "A chat needs at least one message, each a mapping like {'role': 'user', 'content': 'Hello'}; "
                f"got {messages!r:.200}."
            )
        special = {
            "bos_token": self._text_of(self._entry.bos_token_id),
            "eos_token": self._text_of(next(iter(self.eos_token_ids), None)),
            "pad_token": self._text_of(self._entry.pad_token_id),
            **(self._entry.special_tokens or {}),
        }
        try:
            template = _template(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(
                f"The bundle's chat template cannot be parsed ({error.message}, line {error.lineno} of "
                "chat_template.jinja); mend the checkpoint's and export it again."
            ) from error
        try:
            return template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **special,
            )
        except Exception as error:  # the template is foreign code
            raise InvalidInputError(f"The chat template refused the messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of `chat_prompt`. The template writes the special tokens, so none are added."""
        return self.encode(self.chat_prompt(messages, tools=tools), add_special_tokens=False)

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._backend.id_to_token(token_id) or "")


class TextStream:
    """Decodes tokens as they arrive and releases text that later tokens cannot change.

    Only the last few tokens are decoded again. Half a character (a tail that decodes to U+FFFD) is held back. With a
    byte-level tokenizer the pieces joined are what decoding all ids at once gives; a byte-fallback tokenizer may
    differ where the text ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders look at neighbours (they strip a leading space, for instance), so released tokens stay in the
        # window until newer ones are released too: ids[:_read] is released, ids[_read:] is not.
        self._ids: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became readable, maybe none."""
        if self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(_REPLACEMENT):
            return self._release(len(self._ids), text)
        if len(self._ids) - self._read > 2 * _UNDECIDED:
            return self._release_invalid(text)
        return ""

    def flush(self) -> str:
        """Return what is still held back; the text ends here."""
        return self._release(len(self._ids), self._tokenizer.decode(self._ids))

    def _release(self, read: int, text: str) -> str:
        """Release ids up to `read`, whose text in the window is `text`."""
        piece = text[len(self._tokenizer.decode(self._ids[: self._read])) :]
        self._ids = self._ids[self._read :]
        self._read = read - self._read
        return piece

    def _release_invalid(self, text: str) -> str:
        """Release a long run that decodes to no characters, lest the window grow with it, at a character's border."""
        for read in range(len(self._ids) - _UNDECIDED, len(self._ids) - 2 * _UNDECIDED, -1):
            head = self._tokenizer.decode(self._ids[:read])
            if head + self._tokenizer.decode(self._ids[read:]) == text:
                return self._release(read, head)
        return ""


class _GenerationTag(jinja2.ext.Extension):
    """Reads `{% generation %}`, by which training code marks the assistant's part, as nothing but its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What chat templates may use, as transformers offers it; sandboxed, for the template came with a download."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=8)
def _template(source: str) -> jinja2.Template:
    """A compiled template: compiling takes longer than rendering."""
    return _environment().from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def check_text(text: str, name: str) -> None:
    """Refuse halves of characters, which no tokenizer takes; `name` begins the message.

    Raises:
        InvalidInputError: the text holds a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{name} holds a lone surrogate at character {error.start}; give whole text."
        ) from error
