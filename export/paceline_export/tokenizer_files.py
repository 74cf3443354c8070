"""What a bundle keeps of a checkpoint's tokenizer: its files, and what the manifest says of it."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from paceline.bundle import TokenizerEntry
from paceline.errors import CheckpointError

from .checkpoint import Checkpoint
from .pair import token_texts

__all__ = ["MORE_TEMPLATES", "check_templates", "end_tokens", "moved_tokens", "tokenizer_entry", "write_tokenizer"]

# Tokens that end a text by their names, for checkpoints whose generation settings got lost (GGUF keeps one end token).
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
MORE_TEMPLATES = "additional_chat_templates"  # as transformers names the folder


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write tokenizer, chat template and generation settings."""
    tokenizer = checkpoint.tokenizer
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    template = tokenizer.chat_template or {}
    for name, text in ({"default": template} if isinstance(template, str) else template).items():
        path = folder / ("chat_template.jinja" if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    settings = json.dumps(dict(checkpoint.generation_config), indent=1)
    (folder / "generation_config.json").write_text(settings + "\n", encoding="utf-8")


def check_templates(checkpoint: Checkpoint) -> None:
    """Parse the chat templates, as chats would.

    Raises:
        CheckpointError: one cannot be parsed.
    """
    templates = checkpoint.tokenizer.chat_template or {}
    for name, text in ({"default": templates} if isinstance(templates, str) else templates).items():
        try:
            checkpoint.tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hello"}], chat_template=text, tokenize=False
            )
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{checkpoint.source.name}: its chat template {name!r} cannot be parsed ({error.message}, line "
                f"{error.lineno}); mend or remove it in chat_template.jinja or tokenizer_config.json."
            ) from error
        except Exception:  # of another sort of chat than this one
            continue


def moved_tokens(checkpoint: Checkpoint) -> list[str]:
    """Added tokens that have another id than `tokenizer.json` says, each with both, since that one is impossible."""
    if checkpoint.source.gguf_file is not None:
        return []
    try:
        stated = json.loads((checkpoint.source.folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        pairs = [(token["content"], token["id"]) for token in stated]
    except (OSError, ValueError, KeyError, TypeError):  # another sort of tokenizer, which states none
        return []
    ids = {str(token): token_id for token_id, token in checkpoint.tokenizer.added_tokens_decoder.items()}
    return [f"{text!r} {stated} → {ids[text]}" for text, stated in pairs if ids.get(text, stated) != stated]


def tokenizer_entry(checkpoint: Checkpoint) -> TokenizerEntry:
    """What the manifest says of a tokenizer.

    Raises:
        CheckpointError: the settings name an end token that the tokenizer does not have.
    """
    tokenizer, texts = checkpoint.tokenizer, token_texts(checkpoint.tokenizer)
    return TokenizerEntry(
        vocab_size=len(texts),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=end_tokens(checkpoint, texts),
        pad_token_id=tokenizer.pad_token_id,
        special_tokens={
            name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        },
    )


def end_tokens(checkpoint: Checkpoint, texts: list[str | None]) -> tuple[int, ...]:
    """Every id that ends a text: what the settings say, as transformers takes it; without any, what names tell.

    Raises:
        CheckpointError: the settings name a token that the tokenizer does not have.
    """
    tokenizer, stated = checkpoint.tokenizer, checkpoint.end_tokens
    if stated is not None:
        if beyond := sorted(token_id for token_id in stated if token_id >= len(texts)):
            raise CheckpointError(
                f"{checkpoint.source.name}: a text should end at token {beyond[0]} (eos_token_id), but the tokenizer's "
                f"ids end at {len(texts) - 1}. Correct eos_token_id in generation_config.json."
            )
        return tuple(sorted(stated))
    kept = checkpoint.generation_config.get("eos_token_id")
    ids = {*(kept if isinstance(kept, list) else [kept]), tokenizer.eos_token_id}
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    ids.update(token_id for token_id, text in enumerate(texts) if text in _END_TEXTS and text in special)
    return tuple(sorted(token_id for token_id in ids if token_id is not None and 0 <= token_id < len(texts)))
