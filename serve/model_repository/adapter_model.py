"""A LoRA adapter as a model of its own: a name, counters, and the engine of its base."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.arrays import Arrays
from laconic.errors import InputError
from laconic.hashing import digest_file
from laconic.runtimes.adapter_config import WEIGHTS
from serve.batching.statistics import Statistics
from serve.generation.text_writer import TextWriter
from serve.model_repository.model import Model, Prediction


class AdapterModel(Model):
    """Writes as its base does, with an adapter. It has the base's signature, and no verdict: that was about the base.

    base: whose engine it shares, and which stays open as long. folder: of the adapter, in peft's format.
    """

    only_writes = True

    def __init__(self, base: Model, writer: TextWriter, folder: Path, *, name: str, version: str) -> None:
        """Load the adapter. writer: of the base. Raises SourceError for one that is not the base's, and NotReady
        where no engine runs."""
        digest = digest_file(folder / WEIGHTS).sha256 if (folder / WEIGHTS).is_file() else ""
        number = writer.worker.adapters.load(folder, writer.worker.check_running)
        base.adapters.add(number)
        self.base, self.folder, self.users, self.adapters = base, folder, 0, set()
        self.settings, self.artifact, self.backend = base.settings, base.artifact, base.backend
        self.name, self.version, self.digest = name, version, digest
        self.writer = writer.adapt(number)
        self.runtime, self.note, self.verdict = base.runtime, "", None
        self.task, self.inputs, self.outputs = base.task, base.inputs, base.outputs
        self.statistics, self.batcher = Statistics(), base.batcher

    @property
    def location(self) -> Path:
        return self.folder

    async def infer(self, inputs: Arrays, *, timeout: float | None = None) -> Arrays:
        """Raise InputError: the sessions of the base compute without adapters."""
        raise self._refuse()

    async def predict(self, values: Sequence[Any], *, timeout: float | None = None) -> Prediction:
        """Raise InputError, as `infer` does."""
        raise self._refuse()

    def close(self) -> None:
        """Unload the adapter; the engine goes on."""
        assert self.writer is not None
        self.writer.worker.adapters.unload(self.writer.adapter)
        self.base.adapters.discard(self.writer.adapter)

    def _refuse(self) -> InputError:
        return InputError(
            f"model {self.name!r} is an adapter of {self.base.name!r} and only writes texts. Ask /v1/chat/completions, "
            f"/v1/completions or /v2/models/{self.name}/generate"
        )
