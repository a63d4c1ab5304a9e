"""The counters of all models for Prometheus, under Triton's names, so that its dashboards work.

They are read when somebody asks: the hot path only adds integers.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve.model import Model
from serve.repository import Repository

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ModelCollector(Collector):  # type: ignore[misc]
    """Reads the statistics of a repository's models."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def collect(self) -> Iterable[Metric]:
        """One family per number, one sample per model.

        The type is left open: the library would append "_total" to the name of a counter, and Triton's have none.
        """
        rows = [(model, read_counters(model)) for model in self.repository]
        for name, help_text in HELP.items():
            family = Metric(name, help_text, "unknown")
            for model, values in rows:
                family.add_sample(name, {"model": model.name, "version": "1"}, values[name])
            yield family


HELP = {
    "nv_inference_request_success": "Requests answered",
    "nv_inference_request_failure": "Requests answered with an error",
    "nv_inference_count": "Rows that the engine ran",
    "nv_inference_exec_count": "Batches that the engine ran",
    "nv_inference_request_duration_us": "Time from a whole request to its answer, summed, in microseconds",
    "nv_inference_queue_duration_us": "Time in the queue, summed over parts of requests, in microseconds",
    "nv_inference_compute_infer_duration_us": "Time in the engine, summed over batches, in microseconds",
    "nv_inference_pending_request_count": "Parts of requests that wait for an executor",
}


def read_counters(model: Model) -> dict[str, int]:
    """The present values, by metric."""
    statistics = model.statistics
    return {
        "nv_inference_request_success": statistics.succeeded,
        "nv_inference_request_failure": statistics.failed,
        "nv_inference_count": statistics.rows,
        "nv_inference_exec_count": statistics.batches,
        "nv_inference_request_duration_us": (statistics.succeeded_ns + statistics.failed_ns) // 1000,
        "nv_inference_queue_duration_us": statistics.waited_ns // 1000,
        "nv_inference_compute_infer_duration_us": statistics.ran_ns // 1000,
        "nv_inference_pending_request_count": model.batcher.pending,
    }


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, repository: Repository) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ModelCollector(repository))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return bytes(generate_latest(self._registry))
