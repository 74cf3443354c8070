"""transformers' process: `run_transformers TARGET DRAFT THREADS`; DRAFT may be empty.

Each is a folder as `save_pretrained` writes it, or a GGUF file, which transformers unpacks. Weights keep their type.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from .line_server import Figures, Request, record, serve

# Whether a method has a draft, and what `generate` gets besides.
METHODS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    **{f"k{k}": (True, {"num_assistant_tokens": k}) for k in range(1, 7)},
    **{f"lookup-k{k}": (False, {"prompt_lookup_num_tokens": k}) for k in (3, 5)},
}


class Transformers:
    """The target, and its assistant."""

    def __init__(self, target: str, draft: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.methods = tuple(name for name, (drafts, _) in METHODS.items() if draft or not drafts)
        self.versions = {name: version(name) for name in ("torch", "transformers")}
        self._paths = {"target": Path(target), "draft": Path(draft)}
        self._models: dict[str, Any] = {}

    def open(self, method: str) -> None:
        """Load the target, and the draft if the method has one."""
        for name in ("target", "draft") if METHODS[method][0] else ("target",):
            if name not in self._models:
                path = self._paths[name]
                file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
                folder = path.parent if file else path
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **file)
                # A checkpoint's own settings, such as a repetition penalty, would fill what is not asked for.
                model.generation_config = transformers.GenerationConfig()
                self._models[name] = model.eval()

    def run(self, method: str, request: Request) -> Figures:
        """Write one text."""
        drafts, options = METHODS[method]
        settings: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "pad_token_id": 0}
        if not request.ignore_end:
            settings["eos_token_id"] = request.end_ids
        if request.temperature:
            settings |= {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
            torch.manual_seed(max(request.seed, 0))
        more: dict[str, Any] = {}
        if drafts:
            # The number of drafted tokens stays, as every other method's does.
            config = self._models["draft"].generation_config
            config.num_assistant_tokens = options["num_assistant_tokens"]
            config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
            more["assistant_model"] = self._models["draft"]
        else:
            settings |= options
        blocks = _Blocks()
        ids = torch.tensor([request.prompt_ids])
        config = transformers.GenerationConfig(**settings)
        arguments = {"attention_mask": torch.ones_like(ids), "generation_config": config, **more}
        caller = threading.Thread(target=blocks.call, args=(self._models["target"], ids, arguments))
        caller.start()
        try:
            return record(iter(blocks), request)
        finally:
            caller.join()


class _Blocks(transformers.generation.BaseStreamer):  # type: ignore[misc]  # the package has no types
    """Hands on blocks of tokens from the thread that generates; the first one that comes is the prompt."""

    def __init__(self) -> None:
        self._blocks: queue.SimpleQueue[list[int] | Exception | None] = queue.SimpleQueue()
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """Take new tokens."""
        if self._has_prompt:
            self._blocks.put(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing: `call` ends the blocks."""

    def call(self, model: Any, ids: Any, arguments: dict[str, Any]) -> None:
        """Generate."""
        try:
            with torch.inference_mode():
                model.generate(ids, streamer=self, **arguments)
            self._blocks.put(None)
        except Exception as error:  # raised again where the blocks are read
            self._blocks.put(error)

    def __iter__(self) -> Iterator[list[int]]:
        while (block := self._blocks.get()) is not None:
            if isinstance(block, Exception):
                raise block
            yield block


if __name__ == "__main__":
    serve(Transformers(sys.argv[1], sys.argv[2], int(sys.argv[3])))
