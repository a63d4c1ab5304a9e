"""Raw samples to tensors and back, and what a server asks beside that."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError, UsageError
from laconic.tasks.named_task import NamedTask
from laconic.tensor import TensorSpec, sample_inputs

if TYPE_CHECKING:
    from laconic.tasks.generation_settings import GenerationSettings


class TokenLimits(NamedTask):
    """How many tokens a sample may have; for tasks that read none, the defaults limit nothing."""

    @property
    def max_length(self) -> int | None:
        """The most tokens that the model takes; None where the task does not read tokens."""
        return None

    def truncated(self, length: int | None) -> AbstractContextManager[None]:
        """Truncate samples to `length` tokens in the body; None changes nothing.

        Raises UsageError where samples are no tokens.
        """
        if length is None:
            return nullcontext()
        raise UsageError(f"max_length is for texts, and this model is for {self.name}. Leave it out")

    def padded(self, multiple: int) -> AbstractContextManager[None]:
        """Pad the texts of a batch to a multiple of so many tokens in the body, where samples are texts."""
        return nullcontext()

    def count_tokens(self, inputs: Arrays) -> int:
        """Count the tokens of an encoded batch without its padding; 0 where the task does not read tokens."""
        return 0

    def limit_ids(self, count: int) -> None:
        """Take no tokens with ids from `count` on, as the model has no embeddings for them."""
        return

    def check_samples(self, samples: Sequence[Any]) -> None:
        """Raise InputError for a sample that the model has no embeddings for."""
        return

    def count_cut(self, samples: Sequence[Any]) -> int:
        """Count the samples that are longer than the model takes, so that their ends are cut off."""
        return 0


@dataclass(frozen=True)
class Upload:
    """How a sample is uploaded as a file. content_type: as in HTTP, `image/*`. example: a file name for help texts."""

    content_type: str
    example: str

    def matches(self, content_type: str) -> bool:
        """Return whether a request of this content type is such a file."""
        return content_type.startswith(self.content_type.removesuffix("*"))


class Processing(NamedTask, ABC):
    """How raw samples become tensors and back.

    A sample is what `parse` returns: text, an image, arrays. `encode` makes one batch of tensors from samples, and
    `decode` makes one JSON answer per sample from the outputs.
    """

    inputs: tuple[TensorSpec, ...]
    """The tensors that the model takes."""

    padding: dict[str, int]
    """The value that pads each input along its free axis; empty where the samples of a batch must be of one size."""

    typical_sample: Mapping[str, Array] = {}
    """A sample of median size, [1, ...] by input; empty where none is known."""

    @classmethod
    @abstractmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        """Read what `assets` wrote. Raises CorruptArtifact for a file that is missing or does not read."""

    @abstractmethod
    def assets(self) -> dict[str, bytes]:
        """Return the files that the task needs in the artifact, by name."""

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Make a sample from the field of a row, from JSON or from bytes. Raises InputError."""

    @abstractmethod
    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Make one batch of tensors, [samples, ...], padded where lengths differ. samples: parsed."""

    def encode_request(self, sample: Any) -> Arrays:
        """Return the tensors that a server takes, for one parsed sample: [1, ...]."""
        return self.encode([sample])

    @abstractmethod
    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        """Make one answer per sample: JSON-ready, except that arrays stay arrays for the JSON writer to format.
        samples: parsed."""

    @abstractmethod
    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Make synthetic samples of varied lengths, to trace, warm up and time with."""

    def check_values(self, inputs: Arrays) -> None:
        """Raise InputError for values that an engine must not see, as unknown tokens. inputs: of the right shapes."""
        return

    def length(self, sample: Any) -> int:
        """Return the length of a sample, by which samples are sorted into batches; 1 where all have the same size."""
        return 1

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        """Return short fragments of samples, for calibration; none where samples have no parts.

        Samples in files are rarely as short as what users type, and short samples have the largest activations.
        """
        return []

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Draw random inputs to time with: `batch` samples, the free axes `length` long where the bounds allow."""
        rng = np.random.default_rng(seed)
        sizes = {"batch": batch}
        for spec in self.inputs:
            for axis in spec.shape[1:]:
                if isinstance(axis, str):
                    low, high = spec.bounds.get(axis, (1, length))
                    sizes[axis] = min(max(length, low), high)
        return {spec.name: spec.sample(rng, sizes) for spec in self.inputs}

    def timed(self, batch: int, length: int) -> Arrays:
        """Return the inputs of a run that is timed, by which the batch cap is found too; `typical` ones by default."""
        return self.typical(batch, length)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        """Draw random inputs that the model takes. sizes: the size of each free axis, by name."""
        return sample_inputs(self.inputs, sizes, seed)


class ServedTask(Processing, TokenLimits):
    """What a server asks a task: how requests become samples, and answers go back."""

    field_description: ClassVar[str] = "One sample, or a list of samples."
    """What the field takes over HTTP, for the OpenAPI description."""

    upload: ClassVar[Upload | None] = None
    """How a sample is uploaded as a file; None where samples are JSON alone."""

    embeds: ClassVar[bool] = False
    """Whether an answer is a vector, as {"embedding": vector}."""

    ranks: ClassVar[bool] = False
    """Whether a sample is a query with a document, and an answer how well they fit, as {"score": number}."""

    def sample_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what `parse` takes over HTTP; `anyOf` where samples have several forms."""
        return {}

    def example_request(self) -> dict[str, Any]:
        """Return a request to the predict endpoint, JSON-ready but for its arrays."""
        return {self.field: self.examples(1)[0]}

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        """Return the tensors that a server takes: those of the model, but for what generation makes itself."""
        return self.inputs

    def served_outputs(self, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the tensors that a server answers with, by those of the model: what is generated, where it
        generates."""
        return outputs

    def split(self, sample: Any) -> list[Any]:
        """Split a served sample into what is encoded: itself, or parts of one that is longer than the model takes."""
        return [sample]

    def merge(self, answers: Sequence[Any]) -> Any:
        """Merge the answers of the parts that `split` made of a sample into one."""
        return answers[0]

    def derive_sizes(self, sizes: dict[str, int]) -> dict[str, int]:
        """Return the sizes of axes of the outputs that follow from those of the inputs, which a server cuts padding
        by."""
        return {}

    def from_tokens(self, ids: Sequence[int]) -> Any:
        """Return what `parse` takes, from the ids of tokens. Raises InputError where the task does not read tokens."""
        raise InputError(f"this model is for {self.name} and takes no tokens")

    @property
    def generation(self) -> "GenerationSettings | None":
        """How the model writes its answers token by token; None where one run gives an answer."""
        return None
