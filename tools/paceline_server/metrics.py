"""What Prometheus reads: the engine's counters, and latencies as clients see them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .served import Served

__all__ = ["Metrics"]

_GAUGES = {
    "running": "Texts that take turns now.",
    "waiting": "Texts in the queue now.",
    "kv_bytes": "Bytes of KV caches that running texts have reserved.",
}
_COUNTERS = {
    "refused": "Texts that found the queue full.",
    "new_tokens": "Tokens emitted.",
    "prompt_tokens": "Tokens of prompts, of texts that have ended.",
    "cached_tokens": "Those that the prefix cache knew.",
    "rounds": "Target passes after prefill, of texts that have ended.",
    "proposed": "Drafted tokens that were verified, of texts that have ended.",
    "accepted": "Drafted tokens that stood, of texts that have ended.",
    "shared_passes": "Runs of models while several texts had their rounds together.",
    "shared_texts": "Texts in them.",
}
_PARTS = {"prefill_s": "prefill", "target_s": "target", "draft_s": "draft", "overhead_s": "overhead"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter(
            "paceline_requests", "Requests by status; 499: the client went away.", ["endpoint", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.first_token_s = Histogram(
            "paceline_time_to_first_token_seconds",
            "From a request's queueing to its first token.",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.inter_token_s = Histogram(
            "paceline_inter_token_seconds",
            "Between two steps of a text, per token.",
            registry=self._registry,
            buckets=_SECONDS,
        )

    def count_request(self, endpoint: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(endpoint, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's figures; called by the registry."""
        stats = self._served.engine.stats
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"paceline_{name}", text, getattr(stats, name))
        if stats.kv_budget is not None:
            yield GaugeMetricFamily("paceline_kv_budget_bytes", "The most of kv_bytes.", stats.kv_budget)
        prefixes = self._served.decoder.prefixes
        if prefixes is not None:
            yield GaugeMetricFamily("paceline_prefix_bytes", "Bytes in the prefix cache.", prefixes.num_bytes)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"paceline_{name}", text, getattr(stats, name))
        ended = CounterMetricFamily("paceline_texts", "Texts by how they ended.", labels=["outcome"])
        for outcome, count in stats.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        seconds = CounterMetricFamily("paceline_model_seconds", "Where ended texts spent time.", labels=["part"])
        for name, part in _PARTS.items():
            seconds.add_metric([part], getattr(stats, name))
        yield seconds

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
