"""llama.cpp's process: `run_llama_cpp TARGET.gguf THREADS`.

Built for the machine that it runs on: `CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release" pip install
--no-binary llama-cpp-python llama-cpp-python`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import llama_cpp

from .line_server import Figures, Request, record, serve


class LlamaCpp:
    """Plain decoding of a GGUF file, which is mapped into memory."""

    def __init__(self, target: str, threads: int) -> None:
        self.methods: tuple[str, ...] = ("plain",)
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self._target, self._threads = target, threads
        self._model: Any = None

    def open(self, method: str) -> None:
        """Load the model."""
        if self._model is None:
            self._model = llama_cpp.Llama(
                self._target, n_ctx=4096, n_threads=self._threads, n_threads_batch=self._threads, verbose=False
            )

    def run(self, method: str, request: Request) -> Figures:
        """Write one text."""
        model = self._model
        model.reset()  # or the prompt's pass would be spared where the text before began alike
        model.set_seed(max(request.seed, 0))

        def blocks() -> Iterator[list[int]]:
            sampler = {"temp": request.temperature, "top_k": 0, "top_p": request.top_p, "min_p": 0.0}
            for token in model.generate(request.prompt_ids, repeat_penalty=1.0, **sampler):
                yield [token]

        return record(blocks(), request)


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1], int(sys.argv[2])))
