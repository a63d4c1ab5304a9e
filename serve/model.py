"""A served model: an opened artifact with its queue and its counters."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, Choice
from laconic.errors import InputError, RuntimeFailure
from laconic.runtimes.runtime import Session
from laconic.tensor import check_inputs
from serve.batcher import Batcher, Item
from serve.layout import STEP, Cap, Layout
from serve.server_settings import Settings
from serve.statistics import Statistics

VERSION = "1"
"""The only version of a model: another compression is another artifact, with another name."""


class Model:
    """Runs inference on tensors (`infer`) and on samples (`predict`). Owns its sessions.

    note: why this engine was opened, where there was a choice.
    """

    def __init__(
        self, artifact: Artifact, sessions: Sequence[Session], *, runtime: str, queue: int, note: str = ""
    ) -> None:
        manifest = artifact.manifest
        self.name = artifact.name
        self.artifact = artifact
        self.runtime = runtime
        self.note = note
        # Of the placement that was opened: an engine without one of its own runs the preferred graph.
        own = {each.runtime: each.verdict for each in reversed(manifest.placements)}
        self.verdict = own.get(runtime, manifest.verdict)
        self.inputs = manifest.inputs
        self.outputs = manifest.outputs
        self.task = artifact.task()
        self.statistics = Statistics()
        self._sessions = sessions
        self.batcher = Batcher(
            sessions,
            Layout(self.inputs, self.outputs, self.task.padding, step=STEP if manifest.batching else 1),
            cap=read_cap(artifact),
            limit=queue,
            statistics=self.statistics,
        )

    @classmethod
    def open(cls, artifact: Artifact, settings: Settings) -> "Model":
        """Open one session of the artifact for each executor; each is checked against the golden outputs.

        Raises UnprovenArtifact, unless the settings allow it, and the engine's errors.
        """
        executors, threads = settings.parallelism()
        choice = artifact.choose(settings.runtime, threads=threads)
        if not settings.unproven:
            artifact.require_proof(choice.placement)
        sessions = artifact.open_placement(choice.engine, choice.placement, executors, threads=threads)
        note = describe_race(choice) if choice.speeds else ""
        return cls(artifact, sessions, runtime=choice.engine.name, queue=settings.queue, note=note)

    async def infer(self, inputs: Arrays, *, timeout: float | None = None) -> Arrays:
        """The outputs for one request's inputs. timeout: the most seconds in the queue.

        Raises InputError for inputs that do not fit the signature, Overloaded, DeadlineExceeded, NotReady, and what
        the engine raised for these inputs. On cancellation, parts that still wait are dropped.
        """
        check_inputs(self.inputs, inputs)
        layout = self.batcher.layout
        items = self.batcher.submit(layout.split_request(inputs, self.batcher.cap))
        return layout.join_outputs(await self._collect(items, timeout))

    async def predict(self, values: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """One answer per value; each is queued on its own, to share batches with values of a similar length.

        values: what `task.parse` takes. Raises what `infer` raises.
        """
        # Always off the event loop: a tokenizer takes 0.1 ms for a line but 4 ms for a page, a photograph 100 ms.
        encoded = await asyncio.to_thread(self._encode, values)
        layout = self.batcher.layout
        items = self.batcher.submit([layout.make_part(inputs) for inputs in encoded])
        return [self._decode(outputs) for outputs in await self._collect(items, timeout)]

    def close(self) -> None:
        """Stop after the running batches, and close the sessions."""
        self.batcher.close()
        for session in self._sessions:
            session.close()

    def _encode(self, values: Sequence[Any]) -> list[Arrays]:
        encoded = []
        for index, value in enumerate(values):
            try:
                inputs = self.task.encode([self.task.parse(value)])
                check_inputs(self.inputs, inputs)
            except InputError as error:
                raise InputError(f"sample {index}: {error}") from None
            encoded.append(inputs)
        return encoded

    def _decode(self, outputs: Arrays) -> Any:
        for name, array in outputs.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RuntimeFailure(
                    f"the model answered NaN or infinity in {name!r}, which JSON cannot hold. "
                    f"Ask /v2/models/{self.name}/infer with binary outputs to look at it"
                )
        return self.task.decode(outputs)[0]

    async def _collect(self, items: Sequence[Item], timeout: float | None) -> list[Arrays]:
        if timeout is None and len(items) == 1:
            return [await items[0].future]
        futures = [item.future for item in items]
        expiry = None
        if timeout is not None:
            expiry = asyncio.get_running_loop().call_later(timeout, self.batcher.expire, items)
        try:
            return await asyncio.gather(*futures)
        finally:
            if expiry is not None:
                expiry.cancel()
            for future in futures:
                future.cancel()


def describe_race(choice: Choice) -> str:
    """Which placement is opened, and how fast the others are on this machine."""
    own = choice.speeds[choice.engine.name]
    others = [
        f"{own / speed:.2f} x the speed of {name}"
        for name, speed in choice.speeds.items()
        if name != choice.engine.name and speed > 0
    ]
    return f"{choice.engine.name}, {choice.placement.compute}: " + (", ".join(others) or "the others do not run here")


def read_cap(artifact: Artifact) -> Cap:
    """The measured knee as the batch cap; one row where outputs depend on the other rows of a batch."""
    if not artifact.manifest.batching:
        return Cap(1)
    knee = max(1, artifact.measured.knee)
    length = next((timing.length for timing in artifact.measured.timings if timing.batch == knee), 0)
    return Cap(knee, knee * length)
