"""OpenTelemetry traces of requests: encoding, queue, batch, engine, writing. In the trace of the caller if it has one.

The hot path notes times, which it does anyway; spans are made of them when the request is over.
"""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from laconic import __version__
from laconic.errors import MissingPackage
from serve.asgi.wire import Headers
from serve.batching.buckets import Buckets

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from serve.batching.fair_queue import Item

NAME = re.compile(r"(?<=/models/)[^/]+|(?<=/versions/)[^/]+")
MAX_PARTS = 32
"""Parts of a request whose way is traced. The others of a large one go the same way."""


class Tracing:
    """Makes traces, and hands them to what exports them."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("laconic.serve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, endpoint: str) -> Self:
        """Export to an OTLP endpoint over HTTP. Raises MissingPackage.

        Sampling, and the service's name and attributes, are as OpenTelemetry's own variables of the environment say.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise MissingPackage(
                "traces need OpenTelemetry, which is not installed. Try: pip install 'laconic[otel]'"
            ) from None
        # The detected attributes win over the first ones, so that OTEL_SERVICE_NAME does.
        provider = TracerProvider(resource=Resource({SERVICE_NAME: "laconic"}).merge(Resource.create()))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
        return cls(provider)

    def begin(self, path: str, headers: Headers) -> "Trace | None":
        """Begin the trace of a request; return None if it is not sampled. path: with its method."""
        from opentelemetry.trace import SpanKind

        carrier = {name.decode("latin-1"): headers[name].decode("latin-1") for name in CARRIED if name in headers}
        span = self._tracer.start_span(
            NAME.sub(lambda found: "{version}" if found[0].isdigit() else "{name}", path),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
        )
        return Trace(span, self._tracer) if span.is_recording() else None

    def close(self) -> None:
        """Export what waits, and end."""
        self._provider.shutdown()


CARRIED = (b"traceparent", b"tracestate")


class Trace:
    """The spans of one request. Times by `time.monotonic_ns`."""

    def __init__(self, span: "Span", tracer: Any) -> None:
        self.span = span
        self._tracer = tracer
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._parts = 0

    @property
    def id(self) -> str:
        """The trace's id in hexadecimal digits."""
        return f"{self.span.get_span_context().trace_id:032x}"

    def add(self, name: str, start: int, end: int, parent: "Span | None" = None, **attributes: int) -> "Span":
        """Add a span that is over. parent: the request's where None."""
        from opentelemetry.trace import set_span_in_context

        span: Span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent or self.span),
            start_time=start + self._epoch,
            attributes={f"laconic.{key}": value for key, value in attributes.items()},
        )
        span.end(end + self._epoch)
        return span

    def add_parts(self, items: "Iterable[Item]") -> None:
        """Add the way of parts of the request through the queue and the engine."""
        for item in items:
            ran = item.batch
            if ran is None or self._parts == MAX_PARTS:
                return
            self._parts += 1
            self.add("queue", item.queued_ns, ran.started_ns, rows=item.part.rows)
            batch = self.add("batch", ran.started_ns, ran.ended_ns, parts=ran.parts)
            for run in ran.runs:
                self.add("engine", run.started_ns, run.started_ns + run.ns, batch, rows=run.rows)

    def end(self, status: int | None = None, **attributes: str | None) -> None:
        """End the trace: the request is over. status: of HTTP."""
        from opentelemetry.trace import StatusCode

        if status is not None:
            self.span.set_attribute("http.response.status_code", status)
        for key, value in attributes.items():
            if value is not None:
                self.span.set_attribute(f"laconic.{key}", value)
        if status is not None and status >= 500:
            self.span.set_status(StatusCode.ERROR)
        self.span.end()


TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of what the current task works on."""


@contextmanager
def end_trace() -> Iterator[None]:
    """End the trace of the current call with the body."""
    trace = TRACE.get()
    try:
        yield
    finally:
        if trace is not None:
            trace.end()


def trace_parts(items: "Iterable[Item]") -> None:
    """Note the way of parts of the current request, if it is traced."""
    trace = TRACE.get()
    if trace is not None:
        trace.add_parts(items)


def trace_step(name: str, started_ns: int) -> None:
    """Note a step of the current request, which is over, if the request is traced."""
    trace = TRACE.get()
    if trace is not None:
        trace.add(name, started_ns, time.monotonic_ns())


def count_step(name: str, durations: Buckets, started_ns: int) -> None:
    """Count how long a step of the current request took, and note it if the request is traced."""
    durations.observe(time.monotonic_ns() - started_ns)
    trace_step(name, started_ns)
