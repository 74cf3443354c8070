"""ONNX Runtime GenAI's process: `run_genai TARGET DRAFT THREADS as-built|tuned`; DRAFT may be empty.

The folders are written by `python -m onnxruntime_genai.models.builder -i CHECKPOINT -o FOLDER -p int4 -e cpu -c CACHE`;
for "tuned", which stops idle threads from spinning, with `--extra_options block_size=128 accuracy_level=4`. The builder
of 0.18.0 says that it still takes `int4_block_size`, and then drops it: its blocks stay 32 long.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai

from .line_server import Figures, Request, record, serve

# Which model a method runs, and its speculative options.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    **{f"k{k}": ("pair", {"max_draft_tokens": k}) for k in range(1, 7)},
    "n-gram": ("plain", {"ngram_size": 3, "max_draft_tokens": 4}),
}


class GenAI:
    """The target alone, and the pair."""

    def __init__(self, target: str, draft: str, threads: int, kind: str) -> None:
        self.methods = tuple(name for name, (kind, _) in METHODS.items() if draft or kind != "pair")
        self.versions = {"onnxruntime-genai": version("onnxruntime-genai"), "onnxruntime": version("onnxruntime")}
        self._folders = {"decoder": Path(target).resolve(), "draft": Path(draft).resolve()}
        self._session: dict[str, Any] = {}
        if kind == "tuned":
            self._session = {"intra_op_num_threads": threads, "session.force_spinning_stop": "1"}
        self._models: dict[str, Any] = {}

    def open(self, method: str) -> None:
        """Load the model, or the pair."""
        kind = METHODS[method][0]
        if kind in self._models:
            return
        with tempfile.TemporaryDirectory() as folder:
            config = self._config("decoder")
            config["search"]["max_length"] = 4096  # the cache is made as long as this
            model = config["model"]
            parts = {"decoder": model["decoder"]}
            if kind == "pair":
                parts["draft"] = model["draft"] = self._config("draft")["model"]["decoder"]
            for name, part in parts.items():
                Path(folder, name).symlink_to(self._folders[name])
                part["filename"] = f"{name}/{part['filename']}"
                part["session_options"].update(self._session)
            # `record` ends the texts. The last id pads most vocabularies, so that it is never written.
            model["eos_token_id"] = model["vocab_size"] - 1
            for file in self._folders["decoder"].glob("*token*"):
                Path(folder, file.name).symlink_to(file)
            Path(folder, "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
            self._models[kind] = onnxruntime_genai.Model(folder)

    def run(self, method: str, request: Request) -> Figures:
        """Write one text."""
        kind, options = METHODS[method]
        params = onnxruntime_genai.GeneratorParams(self._models[kind])
        params.set_search_options(
            max_length=len(request.prompt_ids) + request.max_new_tokens,
            do_sample=request.temperature > 0,
            temperature=request.temperature or 1.0,
            top_p=request.top_p,
            top_k=0 if request.temperature else 1,
            random_seed=max(request.seed, 0),
        )
        if options:
            params.set_speculative_options(**options)
        generator: list[Any] = []

        def blocks() -> Iterator[list[int]]:
            generator.append(onnxruntime_genai.Generator(self._models[kind], params))
            generator[0].append_tokens(request.prompt_ids)
            if options:
                yield []  # the first round begins here, and it writes several tokens
            while not generator[0].is_done():
                generator[0].generate_next_token()
                yield [int(generator[0].get_next_tokens()[0])]

        figures = record(blocks(), request)
        if options:
            figures.extra["stats"] = dict(generator[0].get_speculative_stats())
        return figures

    def _config(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folders[part] / "genai_config.json").read_text(encoding="utf-8"))
        return found


if __name__ == "__main__":
    serve(GenAI(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
