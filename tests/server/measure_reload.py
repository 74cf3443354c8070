"""Loads the bundle of a busy `paceline serve` anew, again and again: no text may break or change.

    PYTHONPATH=runtime:export:tools python -m tests.server.measure_reload BUNDLE [--clients 16] [--reloads 5]

Clients stream texts all the while; each text that arrives is compared with the library's for the same seed. The last
line of stdout is one JSON document. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from typing import Any

import openai

from .measure_load import Seen, Server, ask, conclude, idle_after, library_texts


async def loaded_anew(server: Server) -> None:
    """Send SIGHUP, and wait until the server says that it has loaded the bundle.

    Raises:
        SystemExit: it says something else, or ends.
    """
    assert server.process.stderr is not None
    server.process.send_signal(signal.SIGHUP)
    line = await asyncio.to_thread(server.process.stderr.readline)
    if "loaded anew; requests" not in line:
        raise SystemExit(f"The server did not load its bundle anew: {line!r}")


async def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, bool]]:
    """All figures, and what has to hold."""
    texts = library_texts(options.bundle, options.clients, options.tokens)
    server = Server(options.bundle)
    seen, took, memory = Seen(), list[float](), list[float]()
    spanned = 0  # texts that began before the bundle was loaded anew, and ended after it
    began = [0] * options.clients  # how often it had been loaded anew when each client's text began
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:

        async def one(number: int) -> None:
            nonlocal spanned
            asked = 0
            while len(took) < options.reloads:
                seed, began[number] = (number + 7 * asked) % len(texts), len(took)
                await ask(client, seed, texts[seed], options.tokens, seen)
                spanned += len(took) > began[number]
                asked += 1

        async def watch() -> None:
            while True:
                memory.append(server.resident_mb())
                await asyncio.sleep(0.2)

        try:
            watching = asyncio.create_task(watch())
            clients = [asyncio.create_task(one(number)) for number in range(options.clients)]
            for _ in range(options.reloads):
                await asyncio.sleep(options.pause)
                while min(began) < len(took):  # a pair before the last one is in use
                    await asyncio.sleep(0.1)
                started = time.perf_counter()
                await loaded_anew(server)
                took.append(time.perf_counter() - started)
            await asyncio.gather(*clients)
            await idle_after(client, server)
            after = Seen()
            await ask(client, 0, texts[0], options.tokens, after)
            await asyncio.sleep(3)  # until what the old pairs held has been returned
            watching.cancel()
            end_mb = server.resident_mb()
            server.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(server.process.wait, 60)
        finally:
            server.process.kill()
    figures = {
        "clients": options.clients,
        "tokens_of_a_text": options.tokens,
        "reloads": len(took),
        "reload_s": [round(seconds, 2) for seconds in took],
        "answers": dict(seen.statuses),
        "wrong_texts": seen.wrong,
        "texts_across_a_reload": spanned,
        "resident_mb": {"first": round(memory[0], 1), "most": round(max(memory), 1), "end": round(end_mb, 1)},
        "exit_code": code,
    }
    held = {
        "every answer is 200": set(seen.statuses) == {"200"},
        "every text is the library's": not (seen.wrong or after.wrong),
        "texts were under way at every reload": spanned >= options.reloads,
        "answers at the end": after.statuses == {"200": 1},
        "two pairs in memory at most": max(memory) <= 2.5 * memory[0],
        "one pair in memory at the end": end_mb <= 1.2 * memory[0],
        "SIGTERM ends it with 0": code == 0,
    }
    return figures, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--reloads", type=int, default=5)
    parser.add_argument("--pause", type=float, default=5, help="Seconds between two of them.")
    parser.add_argument("--tokens", type=int, default=32, help="Of each text.")
    conclude(*asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
