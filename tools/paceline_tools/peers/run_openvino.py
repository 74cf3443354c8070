"""OpenVINO GenAI's process: `run_openvino TARGET DRAFT THREADS`; DRAFT may be empty.

The folders are written by `optimum-cli export openvino -m CHECKPOINT --task text-generation-with-past --weight-format
int4 --group-size 128 --ratio 1.0 --sym FOLDER` of optimum-intel.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

from .line_server import Figures, Request, record, serve

# Which pipeline a method runs, and what its generation config gets besides.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    **{f"k{k}": ("draft", {"num_assistant_tokens": k}) for k in range(1, 7)},
    **{f"confidence-{c}": ("draft", {"assistant_confidence_threshold": c}) for c in (0.4, 0.7)},
    **{f"lookup-k{k}": ("lookup", {"num_assistant_tokens": k, "max_ngram_size": 3}) for k in (3, 5)},
}


class OpenVino:
    """Up to three pipelines: plain, with a draft model, with prompt lookup."""

    def __init__(self, target: str, draft: str, threads: int) -> None:
        self.methods = tuple(name for name, (kind, _) in METHODS.items() if draft or kind != "draft")
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai")}
        self._target, self._draft = target, draft
        self._options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        self._pipelines: dict[str, Any] = {}

    def open(self, method: str) -> None:
        """Compile the method's pipeline."""
        kind = METHODS[method][0]
        if kind in self._pipelines:
            return
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or the prompt's pass would be spared when a prompt comes again
        scheduler.cache_size = 1
        options = {**self._options, "scheduler_config": scheduler}
        if kind == "draft":
            options["draft_model"] = openvino_genai.draft_model(self._draft, "CPU", **self._options)
        if kind == "lookup":
            options["prompt_lookup"] = True
        self._pipelines[kind] = openvino_genai.LLMPipeline(self._target, "CPU", **options)

    def run(self, method: str, request: Request) -> Figures:
        """Write one text."""
        kind, settings = METHODS[method]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_new_tokens
        config.apply_chat_template = False
        config.ignore_eos = request.ignore_end
        config.stop_token_ids = set() if request.ignore_end else set(request.end_ids)
        if request.temperature:
            config.do_sample, config.temperature, config.top_p = True, request.temperature, request.top_p
            config.rng_seed = max(request.seed, 0)
        for name, value in settings.items():
            setattr(config, name, value)
        streamer = _Queue()
        ids = openvino.Tensor(np.array([request.prompt_ids], np.int64))
        caller = threading.Thread(target=streamer.call, args=(self._pipelines[kind], ids, config))
        caller.start()
        try:
            return record(streamer.blocks(), request)
        finally:
            caller.join()


class _Queue(openvino_genai.StreamerBase):  # type: ignore[misc]  # the package has no types
    """Hands on blocks of tokens from the thread that generates."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: queue.SimpleQueue[list[int] | Exception | None] = queue.SimpleQueue()

    def write(self, token: int | list[int]) -> Any:
        self._blocks.put([token] if isinstance(token, int) else list(token))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass

    def call(self, pipeline: Any, ids: Any, config: Any) -> None:
        try:
            pipeline.generate(ids, config, self)
            self._blocks.put(None)
        except Exception as error:  # raised again where the blocks are read
            self._blocks.put(error)

    def blocks(self) -> Iterator[list[int]]:
        while (block := self._blocks.get()) is not None:
            if isinstance(block, Exception):
                raise block
            yield block


if __name__ == "__main__":
    serve(OpenVino(sys.argv[1], sys.argv[2], int(sys.argv[3])))
