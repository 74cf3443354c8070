from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from paceline.bundle import TokenizerEntry
from paceline.errors import BundleError, InvalidInputError
from paceline.tokenizer import Tokenizer

from .conftest import byte_level_tokenizer

# A few merges, so that tokens are bytes, parts of characters, characters, and words.
MERGES = [("h", "a"), ("Ġ", "ha"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ã", "©"), ("ä", "½"), ("t", "h"), ("th", "e")]
TOKENIZER = byte_level_tokenizer(MERGES, special=("<eos>", "<pad>"))
REPLACEMENT = "\ufffd"


def stream_all(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


TEXTS = [
    "plain text, the end",
    "😀 ha ha 😺😺",
    "你好，世界",
    "e\u0301 a\u0308\u0323 नमस्ते",  # combining marks
    "👩‍👩‍👧‍👦 🏳️‍🌈",  # several code points joined
    "mixed 😀é你 <eos> the\n\n\ttabs  ",
    "\u0000\u0007\x7f",
    f"a written {REPLACEMENT} replacement {REPLACEMENT}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_decoded_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(stream_all(TOKENIZER, ids)) == TOKENIZER.decode(ids)
    if "<eos>" not in text:
        assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_no_piece_shows_half_a_character(text: str) -> None:
    assert not any(REPLACEMENT in piece for piece in stream_all(TOKENIZER, TOKENIZER.encode(text)))


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=200)
def test_streamed_text_equals_decoded_text_for_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(stream_all(TOKENIZER, ids)) == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=80))
@settings(deadline=None, max_examples=400)
def test_streamed_text_equals_decoded_text_for_any_ids(ids: list[int]) -> None:
    # Mostly invalid UTF-8: long runs of it are released at characters' borders, not held for ever.
    assert "".join(stream_all(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_a_character_appears_with_its_last_token() -> None:
    ids = TOKENIZER.encode("a😀b")
    assert [bool(piece) for piece in stream_all(TOKENIZER, ids)] == [True, *[False] * (len(ids) - 3), True, True, False]


def test_half_a_character_at_the_end_is_flushed() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    assert stream_all(TOKENIZER, ids)[-1] == REPLACEMENT
    assert "".join(stream_all(TOKENIZER, ids)) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("text", ["word and word " * 40, "😀" * 100])
@pytest.mark.parametrize("invalid", [False, True])
def test_only_a_few_tokens_are_decoded_again(monkeypatch: pytest.MonkeyPatch, text: str, invalid: bool) -> None:
    lead_byte = TOKENIZER.encode("😀")[-1]
    ids = [lead_byte] * 200 if invalid else TOKENIZER.encode(text)
    right, longest = Tokenizer.decode, 0

    def decode(self: Tokenizer, token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return right(self, token_ids)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    stream_all(TOKENIZER, ids)
    assert longest <= 20


def test_a_decoder_that_strips_a_leading_space_keeps_the_spaces_between_words() -> None:
    vocab = {"<unk>": 0, "▁Hello": 1, "▁big": 2, "▁world": 3, "!": 4, "<eos>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, TokenizerEntry(6, None, (5,), None))
    assert stream_all(tokenizer, [1, 2, 3, 4]) == ["Hello", " big", " world", "!", ""]


def test_special_tokens_have_ids_but_no_text() -> None:
    ids = TOKENIZER.encode("a<eos>b")
    assert ids[1] == TOKENIZER.eos_token_ids[0]
    assert TOKENIZER.is_special(ids[1])
    assert not TOKENIZER.is_special(ids[0])
    assert TOKENIZER.decode(ids) == "ab"
    assert stream_all(TOKENIZER, ids) == ["a", "", "b", ""]


def make_files(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> TokenizerEntry:
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tokenizer._entry


def test_a_tokenizer_is_read_from_a_folder(tmp_path: Path) -> None:
    entry = make_files(tmp_path, TOKENIZER, "{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(tmp_path, entry)
    assert tokenizer.encode("the 😀") == TOKENIZER.encode("the 😀")
    assert tokenizer.chat_prompt([{"role": "user", "content": "hi"}]) == "hi"


def test_a_prompt_is_neither_cut_nor_padded_whatever_the_file_says(tmp_path: Path) -> None:
    entry = make_files(tmp_path, TOKENIZER)
    path = tmp_path / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    assert len(Tokenizer.from_folder(tmp_path, entry).encode("abcde")) == 5


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_missing_or_broken_file_is_a_bundle_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BundleError, match=re.escape(str(tmp_path / "tokenizer.json"))):
        Tokenizer.from_folder(tmp_path, TokenizerEntry(5, None, (1,), None))


def test_the_post_processor_adds_special_tokens_to_a_text_but_not_to_a_chat() -> None:
    tokenizer = byte_level_tokenizer(special=("<bos>",), chat_template="<bos>{{ messages[0]['content'] }}")
    bos = tokenizer.eos_token_ids[0]
    tokenizer._backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")


def render(template: str, messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "<Hi> & é"},)) -> str:
    return byte_level_tokenizer(chat_template=template).chat_prompt(messages)


CHATML = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def test_a_chat_is_rendered_up_to_the_assistants_turn() -> None:
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "Hello"}]
    assert render(CHATML, messages) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<Hi> & é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<Hi> & é"\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools is none and eos_token == '<eos>' and bos_token == '' %}yes{% endif %}", "yes"),
        ("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}", "012"),
        ("a{% generation %}{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_templates_may_use_what_transformers_offers(template: str, expected: str) -> None:
    assert render(template) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute 'missing'|is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        render(template)


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        TOKENIZER.chat_prompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}]])
def test_messages_must_be_messages(messages: list[Any]) -> None:
    with pytest.raises(InvalidInputError, match="at least one message"):
        render("x", messages)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_single_tokens_joined_are_the_text(text: str) -> None:
    pieces = [TOKENIZER.token_bytes(token_id) for token_id in TOKENIZER.encode(text)]
    assert b"".join(pieces) == text.encode()


def test_the_bytes_of_sentencepiece_tokens() -> None:
    vocabulary = {"▁the": 0, "é": 1, "<0xE2>": 2, "<s>": 3, "▁": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, TokenizerEntry(5, None, (3,), None))
    assert [tokenizer.token_bytes(token_id) for token_id in range(5)] == [b" the", "é".encode(), b"\xe2", b"<s>", b" "]


@pytest.mark.parametrize("text", [None, 5, b"x", [], ["x"], "\ud800"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"[Tt]he text (must be a string, got|holds a lone surrogate)"):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("ids", [None, 5, [-1], ["a"], [1.5], [2**40]])
def test_what_are_no_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="Token ids must be integers of at least 0, got"):
        TOKENIZER.decode(ids)


def test_a_template_that_cannot_be_parsed_is_the_bundles_fault() -> None:
    broken = Tokenizer(TOKENIZER._backend, TOKENIZER._entry, "{% for m in messages %}{{ m.content }")
    with pytest.raises(BundleError, match=r"chat template cannot be parsed \(.*, line 1 of chat_template\.jinja\)"):
        broken.chat_prompt([{"role": "user", "content": "x"}])
