"""`paceline serve`: a bundle behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

import paceline
from paceline import Bundle, SpeculativeDecoder
from paceline.bundle import MOST_LANES
from paceline_server import Limits, Served
from paceline_server.keys import ApiKeys
from paceline_server.logs import JsonFormatter, RequestLog
from paceline_server.record import Journal
from paceline_server.served import check_name
from paceline_server.server import Address, serve
from paceline_server.traces import Traces

from .arguments import FOLDER, NumberRange, engines_option, folder_name, profile_option, provider_option, threads_option

__all__ = ["command"]

_log = logging.getLogger("paceline_server.start")
_GIB = 1 << 30
_KEYS_VARIABLE = "PACELINE_API_KEYS"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command("serve")
@click.argument("bundle", metavar="DIR", type=FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is every one.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--model-name", metavar="NAME", help="The model's name in the API.  [default: the folder's name]")
@click.option(
    "--api-keys",
    metavar="FILE",
    type=_FILE,
    help=f"Keys, one a line; {_KEYS_VARIABLE} may hold some, too, with commas.  [default: everyone is served]",
)
@click.option("--tls-cert", metavar="FILE", type=_FILE, help="A certificate in PEM, to speak TLS with.")
@click.option("--tls-key", metavar="FILE", type=_FILE, help="Its key.")
@click.option(
    "--max-running", metavar="N", type=click.IntRange(1, 4096), default=16, show_default=True,
    help="Texts that take turns at once.",
)  # fmt: skip
@click.option(
    "--max-batch", metavar="N", type=click.IntRange(1, MOST_LANES), default=1, show_default=True,
    help="Texts in one pass of a model; above 1 the bundle needs the graphs of `paceline batch`.",
)  # fmt: skip
@click.option(
    "--max-waiting", metavar="N", type=click.IntRange(0, 1 << 20), default=64, show_default=True,
    help="Texts in the queue behind them; one more is answered with 429.",
)  # fmt: skip
@click.option(
    "--kv-memory", metavar="GIB", type=NumberRange(0, 1 << 20, min_open=True), default=4.0, show_default=True,
    help="KV caches of running texts together; one that could not fit is refused with the numbers.",
)  # fmt: skip
@click.option(
    "--prefix-cache", metavar="GIB", type=NumberRange(0, 1 << 20), default=1.0, show_default=True,
    help="Keys and values of finished texts, for prompts that begin like them; 0 keeps none.",
)  # fmt: skip
@click.option(
    "--max-prompt-tokens", metavar="N", type=click.IntRange(1), help="Longest prompt.  [default: the model's context]"
)
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(1), default=4096, show_default=True,
    help="Longest text, and that of a chat that does not say.",
)  # fmt: skip
@click.option(
    "--max-choices", metavar="N", type=click.IntRange(1), default=16, show_default=True,
    help="Texts per request: prompts times n.",
)  # fmt: skip
@click.option(
    "--max-body", metavar="MIB", type=NumberRange(0, 1024, min_open=True), default=4.0, show_default=True,
    help="Largest body of a request.",
)  # fmt: skip
@click.option(
    "--max-connections", metavar="N", type=click.IntRange(1), default=1000, show_default=True,
    help="Connections at once; more are answered with 503.",
)  # fmt: skip
@click.option(
    "--timeout", metavar="S", type=NumberRange(0, 1e6, min_open=True), default=600.0, show_default=True,
    help="Seconds from a request's arrival to its last token; a request may ask for less.",
)  # fmt: skip
@click.option(
    "--client-timeout", metavar="S", type=NumberRange(0, 1e6, min_open=True), default=30.0, show_default=True,
    help="Seconds that a client may take to send a request's head, its body, or to read what was sent.",
)  # fmt: skip
@click.option(
    "--drain-timeout", metavar="S", type=click.IntRange(0), default=30, show_default=True,
    help="Seconds that running texts have to end in after SIGTERM.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="text: what goes wrong; json: JSON lines, with one for each request.",
)  # fmt: skip
@click.option("--log-prompts", is_flag=True, help="With --log-format json: what was asked and answered, too.")
@click.option(
    "--traces", "with_traces", is_flag=True,
    help="Send OpenTelemetry traces to where OTEL_EXPORTER_OTLP_ENDPOINT says.",
)  # fmt: skip
@provider_option
@engines_option
@threads_option
@profile_option
def command(
    bundle: Path,
    host: str,
    port: int,
    model_name: str | None,
    api_keys: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_running: int,
    max_batch: int,
    max_waiting: int,
    kv_memory: float,
    prefix_cache: float,
    max_prompt_tokens: int | None,
    max_new_tokens: int,
    max_choices: int,
    max_body: float,
    max_connections: int,
    timeout: float,
    client_timeout: float,
    drain_timeout: int,
    log_format: str,
    log_prompts: bool,
    with_traces: bool,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
) -> None:
    """Serve the bundle in DIR over HTTP, as OpenAI's API does.

    The SHA-256 of every file is checked first. SIGTERM and Ctrl-C let running texts end, then exit with 0. SIGHUP loads
    DIR anew; running texts keep the old models.
    """
    if log_prompts and log_format != "json":
        raise click.UsageError("--log-prompts adds to the lines of --log-format json; give that too.")
    name = check_name(folder_name(bundle) if model_name is None else model_name)
    traces = Traces.from_environment() if with_traces else None
    journals: list[Journal] = [traces] if traces else []
    if log_format == "json":
        _log_json()
        journals.append(RequestLog(with_text=log_prompts))
    keys = ApiKeys.read(api_keys, os.environ.get(_KEYS_VARIABLE))
    address = Address(host, port, tls_cert, tls_key, max_connections, drain_timeout)
    limits = Limits(
        body_bytes=int(max_body * (1 << 20)) or 1,
        prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens,
        choices=max_choices,
        timeout_s=timeout,
        client_s=client_timeout,
    )
    load = partial(
        _load_checked,
        bundle,
        provider=provider,
        threads=threads,
        prefix_cache_bytes=int(prefix_cache * _GIB),
        profile=None if profile == "none" else profile,
        engines=engine_folder,
        max_batch=max_batch,
    )
    engine = paceline.AsyncEngine(
        max_running=max_running,
        max_waiting=max_waiting,
        kv_budget=max(1, int(kv_memory * _GIB)),
        max_batch=max_batch,
    )
    served = Served(load(), engine, name, limits)  # the only one to hold the decoder, for another one may come
    if host not in _LOCAL and not keys:
        _say(f"Warning: whoever reaches {host} is served; --api-keys would ask for a key.", log_format)
    try:
        serve(
            served,
            address,
            keys,
            load=load,
            on_start=lambda url: _say(f"{served.name} is served at {url}/v1; Ctrl-C ends it.", log_format),
            journals=journals,
        )
    finally:
        if traces:
            traces.close()


def _load_checked(bundle: Path, **options: Any) -> SpeculativeDecoder:
    """Load a bundle whose files have their hashes: one with other weights of the same size would load, and fail later.

    Raises what `paceline.load` does.
    """
    Bundle.open(bundle).check_files(verify_hashes=True)
    return paceline.load(bundle, **options)


def _log_json() -> None:
    """Write what is logged as JSON lines, the requests included."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    logging.getLogger("paceline_server").setLevel(logging.INFO)


def _say(text: str, log_format: str) -> None:
    """Tell the user something, in the form of the logs."""
    if log_format == "json":
        _log.info(text)
    else:
        click.echo(text, err=True)
