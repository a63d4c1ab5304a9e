"""The counters of all models for Prometheus, under Triton's names where it has one, so that its dashboards work.

They are read when somebody asks: the hot path only adds integers.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from serve.batching.buckets import Buckets
from serve.batching.statistics import Statistics
from serve.generation.text_writer import TokenWriter
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.security.access import Access

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NANOSECOND = 1e-9


class Counter(NamedTuple):
    """A number that only grows."""

    help: str
    read: Callable[[Statistics], int]


class Distribution(NamedTuple):
    """A histogram. unit: what its values are multiplied by."""

    help: str
    read: Callable[[Statistics], Buckets]
    unit: float = NANOSECOND


COUNTERS = {
    "nv_inference_request_success": Counter("Requests answered", lambda each: each.succeeded),
    "nv_inference_count": Counter("Rows that the engine ran", lambda each: each.rows),
    "nv_inference_exec_count": Counter("Batches that the engine ran", lambda each: each.batches),
    "nv_inference_request_duration_us": Counter(
        "Time from a whole request to its answer, summed, in microseconds",
        lambda each: (each.succeeded_ns + each.failed_ns) // 1000,
    ),
    "nv_inference_queue_duration_us": Counter(
        "Time in the queue, summed over parts of requests, in microseconds", lambda each: each.queue.sum // 1000
    ),
    "nv_inference_compute_input_duration_us": Counter(
        "Time to read and encode samples and tensors, summed over requests, in microseconds",
        lambda each: each.encode.sum // 1000,
    ),
    "nv_inference_compute_infer_duration_us": Counter(
        "Time in the engine, summed over batches, in microseconds", lambda each: each.engine.sum // 1000
    ),
    "nv_inference_compute_output_duration_us": Counter(
        "Time to make answers from outputs, summed over requests, in microseconds", lambda each: each.write.sum // 1000
    ),
}
DISTRIBUTIONS = {
    "laconic_request_duration_seconds": Distribution(
        "Time from a whole request to its answer, of requests that succeeded", lambda each: each.request
    ),
    "laconic_encode_duration_seconds": Distribution(
        "Time to read and encode the samples or tensors of a request", lambda each: each.encode
    ),
    "laconic_queue_duration_seconds": Distribution(
        "Time in the queue, of a part of a request", lambda each: each.queue
    ),
    "laconic_engine_duration_seconds": Distribution("Time in the engine, of a batch", lambda each: each.engine),
    "laconic_batch_rows": Distribution("Rows of a batch", lambda each: each.batch, unit=1),
    "laconic_write_duration_seconds": Distribution("Time to make an answer from the outputs", lambda each: each.write),
}


class Metrics:
    """One server's metrics. connections: those over HTTP that are open."""

    def __init__(self, repository: Repository, access: Access) -> None:
        self.repository = repository
        self.access = access
        self.connections: Collection[object] = ()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def text(self) -> bytes:
        """Format all metrics in Prometheus' text format.

        Written by hand: the library appends "_total" to the names of counters, and Triton's have none.
        """
        return "".join(f"{line}\n" for line in self._lines()).encode() + bytes(generate_latest(self._process))

    async def gather(self) -> bytes:
        """Return what is scraped: the metrics of this server, unless it is one of several that are asked as one."""
        return self.text()

    def _access_lines(self) -> Iterator[str]:
        """Yield the lines of the server as a whole."""
        yield from format_head("laconic_connections", "gauge", "Connections over HTTP")
        yield f"laconic_connections {len(self.connections)}"
        name = "laconic_refused_requests_total"
        yield from format_head(name, "counter", "Requests refused before any work, for their key, rate, host or origin")
        yield from (f'{name}{{status="{status}"}} {count}' for status, count in self.access.refused.items())
        callers = list(self.access.keys or ())
        yield from format_head("laconic_key_requests_total", "counter", "Requests with a key")
        yield from (f'laconic_key_requests_total{{key="{caller.name}"}} {caller.requests}' for caller in callers)
        yield from format_head("laconic_key_rows_total", "counter", "Rows of requests with a key")
        yield from (f'laconic_key_rows_total{{key="{caller.name}"}} {caller.rows}' for caller in callers)

    def _lines(self) -> Iterator[str]:
        models = [(format_labels(model), model.statistics) for model in self.repository]
        for name, counter in COUNTERS.items():
            yield from format_head(name, "counter", counter.help)
            yield from (f"{name}{{{labels}}} {counter.read(statistics)}" for labels, statistics in models)
        yield from format_failures(models)
        name = "nv_inference_pending_request_count"
        yield from format_head(name, "gauge", "Parts of requests that wait for an executor")
        yield from (
            f"{name}{{{format_labels(model)}}} {model.batcher.pending}"
            for model in self.repository
            if not is_adapter(model)
        )
        for name, distribution in DISTRIBUTIONS.items():
            yield from format_head(name, "histogram", distribution.help)
            for labels, statistics in models:
                yield from format_histogram(name, labels, distribution.read(statistics), distribution.unit)
        writers = [(format_labels(each), each.writer) for each in self.repository if each.writer is not None]
        yield from generation_lines(writers) if writers else ()
        yield from self._access_lines()


def generation_lines(writers: Sequence[tuple[str, TokenWriter]]) -> Iterator[str]:
    """Yield the lines of models that write, and of adapters, whose cache is their base's. writers: each behind the
    labels of its model."""
    name = "laconic_generation_first_token_seconds"
    yield from format_head(name, "histogram", "Time from a request to the first token of a choice")
    for labels, writer in writers:
        yield from format_histogram(name, labels, writer.statistics.first_token, NANOSECOND)
    name = "laconic_generation_between_tokens_seconds"
    yield from format_head(name, "histogram", "Time between two tokens of a choice")
    for labels, writer in writers:
        yield from format_histogram(name, labels, writer.statistics.between_tokens, NANOSECOND)
    name = "laconic_generation_tokens_total"
    yield from format_head(name, "counter", "Tokens of the prompts of requests that began, and tokens written")
    for labels, writer in writers:
        yield f'{name}{{{labels},kind="prompt"}} {writer.statistics.prompt_tokens}'
        yield f'{name}{{{labels},kind="generated"}} {writer.statistics.generated_tokens}'
    name = "laconic_generation_cached_tokens_total"
    yield from format_head(name, "counter", "Tokens of prompts that a prefix cache had, where the engine says so")
    yield from (f"{name}{{{labels}}} {writer.statistics.cached_tokens}" for labels, writer in writers)
    name = "laconic_generation_draft_tokens_total"
    yield from format_head(name, "counter", "Tokens that were proposed to the model, and those of them that it chose")
    for labels, writer in writers:
        yield f'{name}{{{labels},kind="proposed"}} {writer.statistics.drafted_tokens}'
        yield f'{name}{{{labels},kind="accepted"}} {writer.statistics.accepted_tokens}'
    workers = [(labels, writer.worker) for labels, writer in writers if not writer.adapter]
    name = "laconic_generation_requests"
    yield from format_head(name, "gauge", "Requests that are being written, and those that wait for room in the cache")
    for labels, worker in workers:
        yield f'{name}{{{labels},state="running"}} {worker.running}'
        yield f'{name}{{{labels},state="waiting"}} {worker.admission.waiting}'
    name = "laconic_generation_cache_blocks"
    yield from format_head(name, "gauge", "Blocks of the cache that requests hold, and all there are")
    for labels, worker in workers:
        yield f'{name}{{{labels},state="used"}} {worker.admission.ledger.used}'
        yield f'{name}{{{labels},state="total"}} {worker.admission.ledger.total}'


def is_adapter(model: Model) -> bool:
    """Return whether a model is an adapter, whose queue and cache are its base's."""
    return model.writer is not None and model.writer.adapter > 0


def format_labels(model: Model) -> str:
    """Format the labels of a model's samples."""
    name = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'model="{name}",version="{model.version}"'


def format_head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    """Format the lines in front of a metric's samples."""
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def format_failures(models: Sequence[tuple[str, Statistics]]) -> Iterator[str]:
    """Format the samples of requests that failed. models: the counters of each, behind its labels."""
    name = "nv_inference_request_failure"
    yield from format_head(name, "counter", "Requests answered with an error")
    for labels, statistics in models:
        yield from (f'{name}{{{labels},reason="{reason}"}} {count}' for reason, count in statistics.failures.items())


def format_histogram(name: str, labels: str, buckets: Buckets, unit: float) -> Iterator[str]:
    """Format the samples of a histogram: the values up to each bound, their sum and their number."""
    total, counts = 0, list(buckets.counts)
    for bound, count in zip(buckets.bounds, counts, strict=False):
        total += count
        yield f'{name}_bucket{{{labels},le="{bound * unit:.9g}"}} {total}'
    total += counts[-1]
    yield f'{name}_bucket{{{labels},le="+Inf"}} {total}'
    yield f"{name}_sum{{{labels}}} {buckets.sum * unit:.9g}"
    yield f"{name}_count{{{labels}}} {total}"
