"""A served model: an opened artifact with its queue and its counters."""

import asyncio
import time
import timeit
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.errors import InputError, NotReady
from laconic.runtimes.runtime import Session
from laconic.tasks.processing import ServedTask
from laconic.tensor import check_inputs
from serve.batching.batcher import Batcher
from serve.batching.fair_queue import Flow, Item
from serve.batching.layout import Cap, Layout, Part
from serve.batching.statistics import Statistics
from serve.generation.text_writer import TextWriter, TokenWriter
from serve.model_repository.backend import Backend
from serve.observation.tracing import trace_parts, trace_step
from serve.requests.offload import offload
from serve.security.keys import count_rows
from serve.settings.server_settings import Settings

CHUNK = 16
"""Samples that are encoded or decoded in one go: texts of a line take 2 ms, photographs a second."""
WAKING = 100e-6
"""Seconds that it takes to wake an executor and be woken by it. A batch that takes less runs on the event loop."""
TIMED = 5
"""Runs that are timed to find that out."""
AHEAD = 2
"""Batches per executor that one request encodes ahead of the engine; 3,000 images at once would take gigabytes."""


class Prediction(NamedTuple):
    """One answer per sample, and the tokens of all samples."""

    answers: list[Any]
    tokens: int


class Model:
    """Runs inference on tensors (`infer`) and on samples (`predict`). Owns the backend that runs its batches.

    digest: of the artifact's manifest. note: why this engine was opened, where there was a choice. users: requests that
    are under way, for which the model stays open; adapters: numbers of those that write with its engine, for which it
    does, too. writer: writes token by token; None where the model does not.
    """

    only_writes: ClassVar[bool] = False
    """Whether it answers neither `infer` nor `predict`."""

    def __init__(
        self,
        artifact: Artifact,
        backend: Backend,
        settings: Settings,
        *,
        name: str,
        version: str,
        digest: str,
        writer: TokenWriter | None = None,
    ) -> None:
        manifest = artifact.manifest
        self.settings = settings
        self.name = name
        self.version = version
        self.digest = digest
        self.users = 0
        self.adapters: set[int] = set()
        self.artifact = artifact
        self.backend = backend
        self.writer = writer
        self.runtime = backend.runtime
        self.note = backend.note
        # Of the placement that was opened: an engine without one of its own runs the preferred graph.
        verdicts = {each.runtime: each.verdict for each in reversed(manifest.placements)}
        self.verdict = verdicts.get(backend.runtime, manifest.verdict)
        self.task: ServedTask = artifact.task()
        self.inputs = self.task.served_inputs()
        self.outputs = self.task.served_outputs(manifest.outputs)
        self.statistics = Statistics()
        self.batcher = Batcher(
            backend.sessions,
            Layout(
                self.inputs,
                self.outputs,
                self.task.padding,
                rounded=manifest.batching,
                derive=self.task.derive_sizes,
            ),
            cap=read_cap(artifact),
            max_wait=settings.queue_seconds,
            statistics=self.statistics,
            inline=backend.local and runs_inline(backend.sessions[0], artifact),
        )

    @property
    def location(self) -> Path:
        """Where its files lie."""
        return self.artifact.path

    @property
    def text_writer(self) -> TextWriter | None:
        """What writes with the model behind a text, if it reads one."""
        return self.writer if isinstance(self.writer, TextWriter) else None

    def check_ready(self) -> None:
        """Raise NotReady while no engine runs the model."""
        reason = self.backend.reason or (self.writer.worker.reason if self.writer is not None else "")
        if reason:
            raise NotReady(f"model {self.name!r} is not ready: {reason}")

    async def infer(self, inputs: Arrays, *, timeout: float | None = None) -> Arrays:
        """Compute the outputs for one request's inputs. timeout: the most seconds in the queue; the settings' where
        None.

        Raises InputError for inputs that do not fit the signature, Overloaded, DeadlineExceeded, NotReady, and what
        the engine raised for these inputs. On cancellation, parts that still wait are dropped.
        """
        check_inputs(self.inputs, inputs)
        self.task.check_values(inputs)
        layout = self.batcher.layout
        parts = layout.split_request(inputs, self.batcher.cap)
        rows = parts[0].rows if len(parts) == 1 else sum(part.rows for part in parts)
        self._check_rows(rows)
        flow, items = self.batcher.open(rows, parts)
        expiry = self._expire_after(timeout, flow)
        try:
            if len(items) == 1:
                return await items[0].future
            return layout.join_outputs(await asyncio.gather(*(item.future for item in items)))
        finally:
            trace_parts(items)
            expiry.cancel()
            self.batcher.drop(flow)

    async def predict(self, values: Sequence[Any], *, timeout: float | None = None) -> Prediction:
        """Answer each value; it is queued on its own, to share batches with values of a similar length.

        Values are encoded, and answers decoded, off the event loop and a few at a time, a little ahead of the engine.
        values: what `task.parse` takes. Raises what `infer` raises."""
        self._check_rows(len(values))
        cap = self.batcher.cap
        long = len(values) > CHUNK
        waiting: deque[tuple[Item, Any]] = deque()
        outputs: list[tuple[Arrays, Any]] = []
        answers: list[Any] = []
        counts: list[int] = []
        tokens = encoded_ns = 0

        async def collect(most: int) -> None:
            while len(waiting) > most:
                item, sample = waiting[0]
                outputs.append((await item.future, sample))
                trace_parts([item])
                waiting.popleft()
                if len(outputs) == CHUNK:
                    answers.extend(await offload(self._decode, outputs[:], long=long))
                    outputs.clear()

        flow, _ = self.batcher.open(len(values))
        expiry = self._expire_after(timeout, flow)
        try:
            for start in range(0, len(values), CHUNK):
                # Always off the event loop: a tokenizer takes 0.1 ms for a line, 4 ms for a page; a photograph 100 ms.
                chunk = values[start : start + CHUNK]
                started = time.monotonic_ns()
                parsed, parts, divided = await offload(self._encode, chunk, start, flow, long=long)
                counts += divided
                if further := len(parts) - len(divided):
                    self._check_rows(sum(counts), further)
                    self.batcher.extend(flow, further)
                encoded_ns += time.monotonic_ns() - started
                trace_step("encode", started)
                tokens += sum(self.task.count_tokens(part.inputs) for part in parts)
                waiting.extend(zip(self.batcher.submit(flow, parts), parsed, strict=True))
                largest = max(cap.rows_at(part.sizes) for part in parts)
                await collect(AHEAD * largest * len(self.backend.sessions))
            self.statistics.encode.observe(encoded_ns)
            await collect(0)
            answers += self._decode(outputs)
            return Prediction(self._merge(answers, counts) if len(answers) > len(values) else answers, tokens)
        finally:
            expiry.cancel()
            self.batcher.drop(flow)
            abandon(item for item, _ in waiting)

    def close(self) -> None:
        """Stop, and close the engines. A batch that runs in this process is waited for."""
        if self.writer is not None:
            self.writer.close()
        self.backend.interrupt()
        self.batcher.close()
        self.backend.close()

    def _check_rows(self, rows: int, further: int | None = None) -> None:
        """Check and count rows. rows: of the whole request. further: those that are not counted yet; all where None."""
        if rows > self.settings.max_rows:
            parts = "" if further is None else " and parts of long ones"
            raise InputError(
                f"the request has {rows} samples{parts}, and this server takes {self.settings.max_rows} at once. "
                f"Send several requests"
            )
        count_rows(rows if further is None else further)

    def _expire_after(self, timeout: float | None, flow: Flow) -> asyncio.TimerHandle:
        """Start the timer of a request's deadline, in the queue."""
        deadline = self.settings.deadline if timeout is None else timeout
        return asyncio.get_running_loop().call_later(deadline, self.batcher.expire, flow)

    def _encode(self, values: Sequence[Any], start: int, flow: Flow) -> tuple[list[Any], list[Part], list[int]]:
        """Encode values; return their samples, what is queued for each, and how many samples each value was split into.

        start: the index of the first value in its request.
        """
        samples: list[Any] = []
        parts: list[Part] = []
        counts = []
        for index, value in enumerate(values, start):
            if not flow.rows:  # dropped: nobody waits for the rest
                break
            try:
                pieces = self.task.split(self.task.parse(value))
                if len(pieces) > (most := self.settings.max_rows):
                    raise InputError(f"it is as long as {len(pieces)} samples, and this server takes {most} at once")
                for sample in pieces:
                    inputs = self.task.encode_request(sample)
                    check_inputs(self.inputs, inputs)
                    parts.append(self.batcher.layout.make_part(inputs))
            except InputError as error:
                raise InputError(f"sample {index}: {error}") from None
            samples += pieces
            counts.append(len(pieces))
        return samples, parts, counts

    def _merge(self, answers: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        """Make one answer per value from those of the samples that it was split into."""
        remaining = iter(answers)
        return [self.task.merge(list(islice(remaining, count))) for count in counts]

    def _decode(self, outputs: Sequence[tuple[Arrays, Any]]) -> list[Any]:
        return [self._decode_row(row, sample) for row, sample in outputs]

    def _decode_row(self, outputs: Arrays, sample: Any) -> Any:
        for name, array in outputs.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(
                    f"the model answers this sample with NaN or infinity in {name!r}, which JSON cannot hold. "
                    f"Ask /v2/models/{self.name}/infer with binary outputs to look at it"
                )
        return self.task.decode(outputs, [sample])[0]


def abandon(items: Iterable[Item]) -> None:
    """Cancel the futures of items that nobody waits for; asyncio would log each exception that nobody looked at."""
    for item in items:
        if not item.future.cancel() and not item.future.cancelled():
            item.future.exception()


def runs_inline(session: Session, artifact: Artifact) -> bool:
    """Return whether the largest batch takes less time than to wake a thread. Only for inputs of a fixed size.

    Where it took longer when the artifact was made, it is not timed again.
    """
    latency = artifact.measured.lone_latency
    free = any(isinstance(axis, str) for spec in artifact.manifest.inputs for axis in spec.shape[1:])
    if free or latency is None or latency >= WAKING:
        return False
    inputs = artifact.task().typical(read_cap(artifact).rows, 1)
    return min(timeit.repeat(lambda: session.run(inputs), number=1, repeat=TIMED)) < WAKING


def read_cap(artifact: Artifact) -> Cap:
    """Return the measured knee as the batch cap; one row where outputs depend on the other rows of a batch."""
    if not artifact.manifest.batching:
        return Cap(1)
    knee = max(1, artifact.measured.knee)
    if artifact.task().generation is not None:  # what is written takes the time, however short the texts are
        return Cap(knee)
    length = next((timing.length for timing in artifact.measured.timings if timing.batch == knee), 0)
    return Cap(knee, knee * length)
