"""Loads `paceline serve` as bad days do: many clients for minutes, clients that vanish or hardly read, and kill -9.

    PYTHONPATH=runtime:export:tools python tests/server/measure_load.py BUNDLE [--clients 64] [--minutes 3]

Every text that arrives is compared with the library's for the same seed. Prints what was seen and whether it is what
the server promises; the last line of stdout is one JSON document. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

import openai

import paceline
from paceline import SamplingParams

PROMPTS = (
    "Question: what is a paceline, and why do riders take turns at its front?\nAnswer:",
    "The three largest rivers of Europe are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam, 😀\n",
)
MODEL = "m"
WARM_UP = 1 / 3  # of the run; memory has to be flat from there on


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        statuses: of answers; "broken" is a stream that ended in an error.
        wrong: texts that were not the library's.
        rates: tokens per second of each client.
        first_s: seconds to first tokens.
        gap_s: seconds between two pieces of a text.
        text_s: seconds of whole texts.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    rates: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    text_s: list[float] = field(default_factory=list)


class Server:
    """The server as a process of its own, always at the same port."""

    def __init__(self, bundle: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._bundle = bundle
        self.start()

    def start(self) -> float:
        """Start it; returns the seconds until it listens."""
        started = time.perf_counter()
        options = ["--model-name", MODEL, "--port", str(self.port), "--prefix-cache", "0.01", "--timeout", "3600"]
        command = [sys.executable, "-m", "paceline_tools", "serve", self._bundle, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "served at" in line:
                return time.perf_counter() - started
        raise SystemExit(f"The server did not start: {''.join(lines)}")

    def resident_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def library_texts(bundle: str, count: int, tokens: int) -> list[str]:
    """The texts that every client has to see."""
    decoder = paceline.load(bundle)
    texts = []
    for seed in range(count):
        sampling = SamplingParams(temperature=1.0, seed=seed, min_new_tokens=tokens)
        steps = decoder.generate(PROMPTS[seed % len(PROMPTS)], sampling, max_new_tokens=tokens)
        texts.append("".join(step.text for step in steps))
    return texts


async def ask(client: openai.AsyncOpenAI, seed: int, wanted: str, tokens: int, seen: Seen) -> int:
    """One streamed text; returns how many tokens arrived."""
    started = last = time.perf_counter()
    text, new_tokens = "", 0
    try:
        chunks = await client.completions.create(
            model=MODEL, prompt=PROMPTS[seed % len(PROMPTS)], seed=seed, max_tokens=tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"min_tokens": tokens},
        )  # fmt: skip
        async for chunk in chunks:
            now = time.perf_counter()
            if chunk.usage is not None:
                new_tokens = chunk.usage.completion_tokens
            if chunk.choices:
                (seen.gap_s if text else seen.first_s).append(now - (last if text else started))
                text, last = text + chunk.choices[0].text, now
    except openai.APIStatusError as error:
        seen.statuses[str(error.status_code)] += 1
        if error.status_code == 429:
            await asyncio.sleep(float(error.response.headers["retry-after"]))
        return 0
    except openai.APIError:
        seen.statuses["broken"] += 1
        return 0
    seen.statuses["200"] += 1
    seen.text_s.append(time.perf_counter() - started)
    seen.wrong += text != wanted
    return new_tokens


async def crowd(
    server: Server, client: openai.AsyncOpenAI, texts: list[str], tokens: int, num_clients: int, seconds: float
) -> tuple[Seen, list[tuple[float, float]]]:
    """Clients that ask again and again, and the server's memory meanwhile: (second, megabytes)."""
    seen, memory, started = Seen(), [], time.perf_counter()

    async def one(number: int) -> None:
        asked = new_tokens = 0
        while time.perf_counter() - started < seconds:
            seed = (number + 7 * asked) % len(texts)
            new_tokens += await ask(client, seed, texts[seed], tokens, seen)
            asked += 1
        seen.rates.append(new_tokens / (time.perf_counter() - started))

    async def watch() -> None:
        while True:
            memory.append((time.perf_counter() - started, server.resident_mb()))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(one(number) for number in range(num_clients)))
    watching.cancel()
    return seen, memory


def open_request(server: Server, tokens: int, **options: Any) -> tuple[socket.socket, bytes]:
    """A connection, and the request to send over it."""
    body = json.dumps({"model": MODEL, "prompt": PROMPTS[0], "max_tokens": tokens, "stream": True} | options).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    return connection, head + body


def vanish(server: Server, count: int, rng: random.Random) -> None:
    """Clients that go away: without a word, in the middle of a request, behind it, or with their answer begun."""
    for number in range(count):
        connection, request = open_request(server, 400)
        with connection:
            if number % 4 == 1:
                connection.sendall(request[: rng.randrange(1, len(request))])
            elif number % 4 > 1:
                connection.sendall(request)
            if number % 40 == 3:
                connection.recv(20)
            if rng.random() < 0.5:  # not even a goodbye: a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def idle_after(client: openai.AsyncOpenAI, server: Server, limit_s: float = 120) -> float:
    """Seconds until the server has nothing to do."""
    started = time.perf_counter()
    while True:
        text = (await client._client.get(f"{server.url}/metrics")).text
        found = dict(re.findall(r"^paceline_(running|waiting) (\S+)$", text, re.MULTILINE))
        if found and not any(map(float, found.values())):
            return time.perf_counter() - started
        if time.perf_counter() - started > limit_s:
            raise SystemExit(f"The server is not idle after {limit_s:.0f} s: {found}")
        await asyncio.sleep(0.05)


async def beside_slow_readers(
    server: Server, client: openai.AsyncOpenAI, texts: list[str], tokens: int, count: int
) -> Seen:
    """A client beside `count` others that take ten bytes in a tenth of a second."""
    seen, readers = Seen(), []
    for seed in range(count):
        connection, request = open_request(server, 64, logprobs=20, seed=seed)
        connection.sendall(request)
        connection.setblocking(False)
        readers.append(connection)

    async def read() -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.gather(*(loop.sock_recv(one, 10) for one in readers))
            await asyncio.sleep(0.1)

    reading = asyncio.create_task(read())
    for seed in range(3):
        await ask(client, seed, texts[seed], tokens, seen)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for connection in readers:
        connection.close()
    return seen


async def kill_and_restart(
    server: Server, client: openai.AsyncOpenAI, texts: list[str], tokens: int
) -> tuple[float, float, Seen]:
    """kill -9 with texts on their way, a new start at the same port; seconds to listening, and from there to a text."""
    lost, seen = Seen(), Seen()
    running = [asyncio.create_task(ask(client, seed, texts[seed], tokens, lost)) for seed in range(4)]
    await asyncio.sleep(0.5)
    server.process.kill()
    server.process.wait()
    await asyncio.gather(*running)
    listens = server.start()
    started = time.perf_counter()
    await ask(client, 0, texts[0], tokens, seen)
    return listens, seen.first_s[0] if seen.first_s else time.perf_counter() - started, seen


def at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{round(100 * share)}": round(at(values, share), 4) for share in (0.5, 0.9, 0.99)} if values else {}


async def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, bool]]:
    """All figures, and what has to hold."""
    texts = library_texts(options.bundle, 16, options.tokens)
    server = Server(options.bundle)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
        try:
            seconds = 60 * options.minutes
            seen, memory = await crowd(server, client, texts, options.tokens, options.clients, seconds)
            warm = [mb for second, mb in memory if second >= WARM_UP * seconds]
            vanish(server, options.vanish, random.Random(0))
            vanished_s = await idle_after(client, server)
            after, slow = Seen(), Seen()
            await ask(client, 1, texts[1], options.tokens, after)
            after_vanish_mb = server.resident_mb()
            slow = await beside_slow_readers(server, client, texts, options.tokens, options.slow)
            await idle_after(client, server)
            listens_s, first_s, restarted = await kill_and_restart(server, client, texts, options.tokens)
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
        finally:
            server.process.kill()
    median = statistics.median(seen.rates)
    figures = {
        "clients": options.clients,
        "minutes": options.minutes,
        "answers": dict(seen.statuses),
        "wrong_texts": seen.wrong,
        "tokens_per_s": round(sum(seen.rates), 2),
        "slowest_over_median_rate": round(min(seen.rates) / median, 3),
        "first_token_s": quantiles(seen.first_s),
        "between_pieces_s": quantiles(seen.gap_s),
        "text_s": quantiles(seen.text_s),
        "resident_mb": {"warm": round(warm[0], 1), "most": round(max(warm), 1), "vanished": round(after_vanish_mb, 1)},
        "vanished": options.vanish,
        "idle_after_vanished_s": round(vanished_s, 2),
        "texts_beside_slow_readers": dict(slow.statuses),
        "listens_after_s": round(listens_s, 2),
        "first_token_after_listening_s": round(first_s, 2),
        "exit_code": code,
    }
    held = {
        "no error but 429": set(seen.statuses) <= {"200", "429"},
        "every text is the library's": not (seen.wrong or after.wrong or slow.wrong or restarted.wrong),
        "slowest client >= 0.5 x median": min(seen.rates) >= 0.5 * median,
        "memory within 5 % after warm-up": max(warm) <= 1.05 * warm[0] and after_vanish_mb <= 1.05 * warm[0],
        "answers after clients vanished": after.statuses == {"200": 1},
        "answers beside slow readers": slow.statuses == {"200": 3},
        "answers within 2 s of loading": restarted.statuses == {"200": 1} and first_s <= 2,
        "SIGTERM ends it with 0": code == 0,
    }
    return figures, held


def conclude(figures: dict[str, Any], held: dict[str, bool]) -> NoReturn:
    """Print what was seen and what holds, and end with 1 where something does not."""
    for name, value in figures.items():
        print(f"{name:<30} {value}")
    for name, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}  {name}")
    print(json.dumps({"figures": figures, "held": held}))
    sys.exit(not all(held.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="Of each text.")
    parser.add_argument("--vanish", type=int, default=500, help="Clients that connect and vanish.")
    parser.add_argument("--slow", type=int, default=20, help="Clients that hardly read.")
    conclude(*asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
