"""Figures for Prometheus. Names follow vLLM's where they mean the same, with our prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from anabatic.infer.server.engine_worker import EngineWorker, RequestGroup
from anabatic.infer.server.model_registry import ServedModel

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """Counts what was answered, and asks the engines how busy they are."""

    def __init__(self, models: Iterable[ServedModel], worker: EngineWorker) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "anabatic_requests", "Requests by model and how they ended.", ("model", "end"), registry=self._registry
        )
        self._responses = Counter(
            "anabatic_http_responses", "Answers over HTTP by status.", ("status",), registry=self._registry
        )
        self._time_to_first_token = self._make_histogram(
            "time_to_first_token_seconds", "From a request to its first token."
        )
        self._request_latency = self._make_histogram("e2e_request_latency_seconds", "From a request to its end.")
        self._time_per_token = self._make_histogram(
            "time_per_output_token_seconds", "Mean time between the tokens of an answer."
        )
        self._registry.register(_EngineCollector(list(models), worker))

    def _make_histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"anabatic_{name}", about, ("model",), buckets=_LATENCY_BUCKETS, registry=self._registry)

    def count_request(self, model: str, end: str, group: RequestGroup | None = None) -> None:
        """Count a request.

        Args:
            end: `stop`, `length`, `gone` (the client), `timeout`, `error`, `refused`.
        """
        self._requests.labels(model, end).inc()
        if group is None or group.first_token_at is None or group.last_token_at is None:
            return
        self._time_to_first_token.labels(model).observe(group.first_token_at - group.started_at)
        self._request_latency.labels(model).observe(group.last_token_at - group.started_at)
        longest = max(len(request.ids) for request in group.requests)
        if longest > 1:
            self._time_per_token.labels(model).observe((group.last_token_at - group.first_token_at) / (longest - 1))

    def count_response(self, status: int) -> None:
        """Count an answer: 429 is a full queue, 500 and 503 are faults."""
        self._responses.labels(str(status)).inc()

    def render_metrics(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Load of the engines, read when Prometheus asks."""

    def __init__(self, models: list[ServedModel], worker: EngineWorker) -> None:
        self._models, self._worker = models, worker

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure."""
        gauges = {
            "num_requests_running": ("Requests that are being answered.", "running"),
            "num_requests_waiting": ("Requests that wait for a place.", "waiting"),
            "cache_blocks": ("Blocks of the cache.", "blocks"),
            "cache_blocks_used": ("Blocks that requests hold.", "used"),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
            "shared_prompt_tokens": ("Tokens of prompts that were in the cache.", "shared_tokens"),
            "generation_tokens": ("Tokens of answers.", "new_tokens"),
            "steps": ("Forward passes.", "steps"),
        }
        loads = [(served.name, served.engine.get_load()) for served in self._models if served.adapter is None]
        for table, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (about, key) in table.items():
                metric = family(f"anabatic_{name}", about, labels=("model",))
                for model, load in loads:
                    metric.add_metric((model,), getattr(load, key))
                yield metric
        yield GaugeMetricFamily("anabatic_up", "1 while requests are answered.", value=0 if self._worker.failure else 1)
