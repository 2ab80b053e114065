"""Prometheus metrics: gauges and counters straight from the scheduler's statistics, latency histograms measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gristmill.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "running": ("gristmill_requests_running", "Choices that hold a request slot"),
    "waiting": ("gristmill_requests_waiting", "Choices that wait for admission"),
    "pool_total": ("gristmill_pool_tokens", "Token slots of the KV pool"),
    "pool_free": ("gristmill_pool_free_tokens", "Token slots that hold nothing"),
    "pool_evictable": ("gristmill_pool_evictable_tokens", "Token slots of cached prefixes that nobody uses"),
    "pool_locked": ("gristmill_pool_locked_tokens", "Token slots of requests"),
    "window_total": ("gristmill_window_pool_tokens", "Token slots of the pool of sliding-window layers, 0 without one"),
    "window_free": ("gristmill_window_pool_free_tokens", "Of those, slots that hold nothing"),
    "window_evictable": ("gristmill_window_pool_evictable_tokens", "Of those, slots of cached prefixes that nobody uses"),
    "window_locked": ("gristmill_window_pool_locked_tokens", "Of those, slots of requests"),
    "age_s": ("gristmill_oldest_step_seconds", "Age of the oldest step that was sent and not answered"),
}
_COUNTERS = {
    "prompt_tokens": ("gristmill_prompt_tokens", "Prompt tokens of all choices"),
    "cached_tokens": ("gristmill_cached_tokens", "Prompt tokens found in the prefix cache"),
    "output_tokens": ("gristmill_output_tokens", "Generated tokens"),
    "retractions": ("gristmill_retractions", "Choices put back for lack of token slots"),
    "preemptions": ("gristmill_preemptions", "Choices put back for one of higher priority"),
    "prefix_waits": ("gristmill_prefix_waits", "Admissions put off because the prompt's prefix was just being computed"),
    "aborts": ("gristmill_aborts", "Choices aborted"),
    "chunks": ("gristmill_prompt_chunks", "Prompt chunks computed"),
    "zombie_rows": ("gristmill_zombie_rows", "Rows computed for requests that had ended"),
    "applied_step": ("gristmill_steps", "Steps applied"),
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Stats], ready: Callable[[], bool]) -> None:
        self._stats, self._ready = stats, ready

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        yield GaugeMetricFamily("gristmill_ready", "1 while requests are taken", float(self._ready()))
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(metric, text, getattr(stats, name))
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(metric, text, getattr(stats, name))


class Metrics:
    """All metrics of one server, in a registry of their own. `stats` and `ready` are asked at each scrape."""

    def __init__(self, stats: Callable[[], Stats], ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, ready))
        self._requests = Counter("gristmill_http_requests", "Requests by route and status", ["route", "status"], registry=self.registry)
        self._ttft = Histogram(
            "gristmill_time_to_first_token_seconds", "From the request to its first text", buckets=_SECONDS, registry=self.registry
        )
        self._tpot = Histogram(
            "gristmill_time_per_output_token_seconds", "Mean time between tokens", buckets=_PER_TOKEN_SECONDS, registry=self.registry
        )
        self._e2e = Histogram("gristmill_request_seconds", "From the request to its last byte", buckets=_SECONDS, registry=self.registry)

    def count(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def observe(self, started: float, first_token: float, last_token: float, n_tokens: int, choices: int) -> None:
        """One finished generation; times in seconds of one clock."""
        self._e2e.observe(last_token - started)
        if first_token:
            self._ttft.observe(first_token - started)
            steps = n_tokens / max(1, choices) - 1
            if steps > 0:
                self._tpot.observe((last_token - first_token) / steps)

    def render(self) -> bytes:
        return generate_latest(self.registry)
