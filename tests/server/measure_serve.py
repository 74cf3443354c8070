"""Measures `paceline serve` beside the library: overhead, time to first token, and many clients at once.

    PYTHONPATH=runtime:export:tools python tests/server/measure_serve.py BUNDLE [--clients 64] [--tokens 32]

The server is a process of its own; library and server take turns, request by request, in changing order. Between
turns is a pause, in which the threads of the one before cease to spin. Every text is compared with the library's. The
last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import openai

import paceline
from paceline import SamplingParams, SpeculativeDecoder

PROMPT = "Question: what is a paceline, and why do riders take turns at its front?\nAnswer:"

PAUSE_S = 0.2


def by_library(decoder: SpeculativeDecoder, seed: int, tokens: int) -> tuple[str, float, float]:
    """A text, seconds to its first token, and seconds to its end."""
    started = time.perf_counter()
    sampling = SamplingParams(temperature=1.0, seed=seed, min_new_tokens=tokens)
    generation = decoder.generate(PROMPT, sampling, max_new_tokens=tokens)
    next(generation)
    first = time.perf_counter() - started
    for _ in generation:
        pass
    return generation.text, first, time.perf_counter() - started


def by_http(url: str, seed: int, tokens: int) -> tuple[str, float, float]:
    """The same from a server, to a client that only reads and leaves the parsing for later."""
    started = time.perf_counter()
    body = {"model": "m", "prompt": PROMPT, "seed": seed, "max_tokens": tokens, "min_tokens": tokens, "stream": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, first, received = connection.getresponse(), 0.0, b""
    while piece := answer.read1():
        first = first or time.perf_counter() - started
        received += piece
    whole = time.perf_counter() - started
    connection.close()
    events = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events), first, whole


async def by_server(client: openai.AsyncOpenAI, seed: int, tokens: int) -> tuple[str, float, float]:
    """The same, as OpenAI's own client sees it, which shares the cores and parses between the tokens."""
    started = time.perf_counter()
    chunks = await client.completions.create(
        model="m", prompt=PROMPT, seed=seed, max_tokens=tokens, stream=True, extra_body={"min_tokens": tokens}
    )
    text, first = "", 0.0
    async for chunk in chunks:
        first = first or time.perf_counter() - started
        text += chunk.choices[0].text
    return text, first, time.perf_counter() - started


async def measure(
    url: str, pid: int, decoder: SpeculativeDecoder, clients: int, tokens: int, pairs: int
) -> dict[str, Any]:
    """All figures."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
        by_library(decoder, 0, tokens)
        await by_server(client, 0, tokens)
        alone: list[Turns] = []
        for seed in range(pairs):
            sides = ["library", "http", "openai"]
            random.Random(seed).shuffle(sides)
            turns = {}
            for side in sides:
                time.sleep(PAUSE_S)
                if side == "library":
                    turns[side] = by_library(decoder, seed, tokens)
                elif side == "http":
                    turns[side] = by_http(url, seed, tokens)
                else:
                    turns[side] = await by_server(client, seed, tokens)
            assert len({text for text, _, _ in turns.values()}) == 1
            alone.append(turns)
        wanted = [by_library(decoder, seed, tokens)[0] for seed in range(clients)]
        memory, started = resident(pid), time.perf_counter()
        many = await asyncio.gather(*(by_server(client, seed, tokens) for seed in range(clients)))
        wall = time.perf_counter() - started
    assert [text for text, _, _ in many] == wanted
    rates = sorted(tokens / seconds for _, _, seconds in many)
    firsts, wholes = sorted(first for _, first, _ in many), sorted(seconds for _, _, seconds in many)
    return {
        "overhead": overhead(alone, "http"),
        "overhead_with_openai_client": overhead(alone, "openai"),
        "first_token_ms_more": first_token_ms_more(alone, "http"),
        "first_token_ms_more_with_openai_client": first_token_ms_more(alone, "openai"),
        "library_first_token_ms": 1000 * statistics.median(turns["library"][1] for turns in alone),
        "library_tokens_per_s": statistics.median(tokens / turns["library"][2] for turns in alone),
        "clients": clients,
        "tokens_per_s": clients * tokens / wall,
        "slowest_over_median_rate": rates[0] / statistics.median(rates),
        "first_token_s": {name: at(firsts, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "text_s": {name: at(wholes, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "resident_mb": (memory, resident(pid)),
    }


Turns = dict[str, tuple[str, float, float]]  # a text by each side


def overhead(alone: list[Turns], side: str) -> float:
    """What a text takes longer than by the library, as a share."""
    return statistics.median(turns[side][2] / turns["library"][2] for turns in alone) - 1


def first_token_ms_more(alone: list[Turns], side: str) -> float:
    """Milliseconds that a first token takes longer than by the library."""
    return 1000 * statistics.median(turns[side][1] - turns["library"][1] for turns in alone)


def at(values: list[float], share: float) -> float:
    """A quantile of sorted values."""
    return values[min(int(share * len(values)), len(values) - 1)]


def resident(pid: int) -> int:
    """Megabytes that a process holds."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8, help="Requests by library and server, in turns.")
    options = parser.parse_args()
    command = [sys.executable, "-m", "paceline_tools", "serve", options.bundle, "--model-name", "m", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"served at (\S+)/v1", line)))
        decoder = paceline.load(options.bundle)
        figures = asyncio.run(measure(url, server.pid, decoder, options.clients, options.tokens, options.pairs))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    for name, value in figures.items():
        print(f"{name:<38} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
