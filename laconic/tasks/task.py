"""The interface of a task: every question whose answer depends on what a model is for."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from laconic import registry
from laconic.arrays import Array, Arrays
from laconic.errors import INTERRUPTS, CorruptArtifact, InputError, SourceError, UsageError
from laconic.files import read_json
from laconic.metrics import Scorer
from laconic.tasks.null_answers import repeat_mean, shuffle_rows
from laconic.tensor import TensorSpec, sample_inputs

if TYPE_CHECKING:
    from laconic.tasks.agreement import Agreement
    from laconic.tasks.generation_settings import GenerationSettings
    from laconic.tasks.preprocessing import Preprocessing

DEFAULT_TASK = "tensors"
"""The task of a module or a graph where none is named."""
PREPROCESS = "preprocess.json"
TOKENIZER = "tokenizer.json"
VOCABULARY = "vocabulary.json"
"""How many ids the model takes, where its tokenizer gives more."""
LABELS = "labels.json"
LABEL = "label"
"""The column of a sample's label."""
PAIR = ("text1", "text2")
"""The columns of the two texts of a pair."""
LOWEST_AGREEMENT = 0.5
"""However low the goal, half of what the original's answers say must be left."""
SCORE = "score"
"""The column that says how alike the texts of a pair are."""


class Tolerance(BaseModel):
    """The least fidelity of an artifact to the original: the mean over samples, and the worst one (1 = identical).

    slack: how many times as far from 1 as by default the agreements of a task may be; 0 where none is required.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    worst: float | None = None
    slack: float = 1.0

    def met_by(self, fidelity: Array) -> bool:
        """Whether the mean, and the worst sample where it is bounded, are high enough. fidelity: [samples]."""
        return bool(fidelity.mean() >= self.mean and (self.worst is None or fidelity.min() >= self.worst))

    def loosen(self, least: float) -> float:
        """The least value of an agreement by this tolerance, from that by the default one; at least LOWEST_AGREEMENT
        where any is required."""
        return max(1 - self.slack * (1 - least), min(LOWEST_AGREEMENT, least)) if self.slack and least else 0.0

    def describe(self) -> str:
        """Format the tolerance, as in `mean >= 0.99, worst >= 0.95`."""
        worst = "" if self.worst is None else f", worst >= {self.worst:g}"
        return f"mean >= {self.mean:g}{worst}"


SampleKind = Literal["texts", "images", "audio", "arrays"]
"""What a file of samples can hold."""

HealingLoss = Literal["hidden-states", "last-hidden-state", "outputs", "probabilities", "similarities", "vectors"]
"""The distillation losses that healing knows."""


@dataclass(frozen=True)
class Upload:
    """How a sample is uploaded as a file. content_type: as in HTTP, `image/*`. example: a file name for help texts."""

    content_type: str
    example: str

    def matches(self, content_type: str) -> bool:
        """Whether a request of this content type is such a file."""
        return content_type.startswith(self.content_type.removesuffix("*"))


class Task(ABC):
    """What a model is for.

    A sample is what `parse` returns: text, an image, arrays. `encode` makes one batch of tensors from samples, and
    `decode` makes one JSON answer per sample from the outputs. Code outside `laconic.tasks` asks a task by its
    attributes and methods, and never compares its name or its class: a new task is one file and a line in the registry.
    """

    name: ClassVar[str]
    """The name in the registry."""
    tolerance: ClassVar[Tolerance]
    """How faithful an artifact must be where a goal says nothing."""
    metric: ClassVar[str]
    """The name of the figure that `scorer` computes."""

    # Samples: in files and over HTTP.
    field: ClassVar[str]
    """The key of a sample, in a file of samples and over HTTP."""
    field_description: ClassVar[str] = "One sample, or a list of samples."
    """What the field takes over HTTP, for the OpenAPI description."""
    columns: ClassVar[tuple[str, ...]] = (LABEL,)
    """The further columns that a row of a file may have, beside `field`."""
    upload: ClassVar[Upload | None] = None
    """How a sample is uploaded as a file; None where samples are JSON alone."""
    accepts: ClassVar[frozenset[SampleKind]] = frozenset()
    """The kinds of sample that the task reads from files which hold one kind only: .txt, .npz, folders of images."""
    decodes_files: ClassVar[bool] = False
    """Whether `parse` decodes files outside the interpreter lock, so that threads help."""

    labels_alike: ClassVar[bool] = True
    """Whether the labels of all samples must be of one shape."""
    embeds: ClassVar[bool] = False
    """Whether an answer is a vector, as {"embedding": vector}."""

    # Training, healing and pruning.
    objective: ClassVar[str]
    """The training objective, by its name in the registry."""
    self_supervised: ClassVar[bool] = False
    """Whether the objective learns from samples without labels."""
    unlabelled_gradient: ClassVar[Literal["likelihood", "answer"]] = "answer"
    """Without labels, importance criteria take the gradient of the likelihood of a class drawn from the model's own
    answer, or of the answer itself."""
    has_logits: ClassVar[bool] = True
    """Whether the last axis of the first output can hold the logits of classes."""
    planning_length: ClassVar[int] = 512
    """The length of a row for which memory is planned, at most, where the request names none."""

    # Checkpoints of transformers.
    auto_class: ClassVar[str | None] = None
    """The Auto class of transformers that builds the model; None where the task is not for models of transformers."""
    architectures: ClassVar[tuple[str, ...]] = ()
    """The endings of the architecture names in a config.json that are for this task."""
    has_class_head: ClassVar[bool] = False
    """Whether the model's outputs depend on the labels, so that other labels need a new head."""
    problem_type: ClassVar[str | None] = None
    """What the config.json of a new head says of its labels; None where it says nothing."""

    inputs: tuple[TensorSpec, ...]
    padding: dict[str, int]
    """The value that pads each input along its free axis; empty where the samples of a batch must be of one size."""
    labels: tuple[str, ...] = ()
    """The names of the classes; empty where they have none."""

    @classmethod
    def from_signature(cls, inputs: tuple[TensorSpec, ...]) -> Self:
        """The task of a plain module or graph with these inputs, without a tokenizer or image settings.

        Raises SourceError where the task needs more than the inputs.
        """
        raise SourceError(f"task {cls.name!r} needs a tokenizer. Choose a task that reads arrays, as {DEFAULT_TASK}")

    @classmethod
    def from_preprocessing(cls, preprocessing: "Preprocessing") -> Self:
        """The task of a checkpoint of transformers; every task with an `auto_class` has this."""
        raise SourceError(f"task {cls.name!r} is not for models of transformers. Give the model with a --builder")

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json, of one of the `architectures`, can be for this task."""
        return True

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json, of one of the `architectures`, is for this task by default."""
        return cls.fits(config)

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        """The classes of a new head for these labels of rows; empty where a head with the classes `known` has them all.

        Asked where `has_class_head`. Raises DataError for labels that are not for this task.
        """
        return ()

    @classmethod
    @abstractmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        """Read what `assets` wrote. Raises CorruptArtifact for a file that is missing or does not read."""

    @abstractmethod
    def assets(self) -> dict[str, bytes]:
        """The files that the task needs in the artifact, by name."""

    def with_labels(self, labels: Sequence[str]) -> Self:
        """The same task for a model with other classes."""
        task = copy.copy(self)
        task.labels = tuple(labels)
        return task

    def with_chat_template(self, text: str) -> Self:
        """The same task for a model with another chat template. Raises UsageError where samples are no chats."""
        raise UsageError(f"a chat_template is for language models, and this model is for {self.name}. Leave it out")

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """A sample from the field of a row, from JSON or from bytes. Raises InputError."""

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """The samples of a row of a file in `folder`, as `parse` takes them, and its label or None.

        One sample; two where the row is a pair of samples that are compared with each other. Raises InputError.
        """
        if self.field not in values:
            raise InputError(
                f"there is no {self.field!r} among the columns {', '.join(map(repr, values))}. Name the one that holds "
                f"it: --column {self.field}=NAME"
            )
        return (self.read_field(values[self.field], folder),), values.get(LABEL)

    def read_field(self, value: Any, folder: Path) -> Any:
        """What `parse` takes, from the field of a row of a file in `folder`. Raises InputError."""
        return value

    def from_arrays(self, arrays: Arrays) -> Any:
        """What `parse` takes, from the arrays of one sample by input."""
        return arrays

    def sample_schema(self) -> dict[str, Any]:
        """The JSON Schema of what `parse` takes over HTTP; `anyOf` where samples have several forms."""
        return {}

    def example_request(self) -> dict[str, Any]:
        """A request to the predict endpoint, JSON-ready but for its arrays."""
        return {self.field: self.examples(1)[0]}

    def parse_label(self, value: Any, sample: Any) -> Any:
        """The label of a parsed sample from a row's value. Raises InputError or DataError for one that `scorer` cannot
        use."""
        return value

    def check_values(self, inputs: Arrays) -> None:
        """Raise InputError for values that an engine must not see, as unknown tokens. inputs: of the right shapes."""
        return

    @abstractmethod
    def encode(self, samples: Sequence[Any]) -> Arrays:
        """One batch of tensors, [samples, ...], padded where lengths differ. samples: parsed."""

    @abstractmethod
    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        """One answer per sample: JSON-ready, except that arrays stay arrays for the JSON writer to format. samples:
        parsed."""

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a server takes: those of the model, but for what generation makes itself."""
        return self.inputs

    def served_outputs(self, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The tensors that a server answers with, by those of the model: what is generated, where it generates."""
        return outputs

    def encode_request(self, sample: Any) -> Arrays:
        """The tensors that a server takes, for one parsed sample: [1, ...]."""
        return self.encode([sample])

    def has_target(self, sample: Any) -> bool:
        """Whether a sample says what a model is to write for it, where the model reads that too."""
        return True

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        """The samples with the answers of a model as their targets. written: [samples, tokens] int64, padded."""
        return list(samples)

    def split(self, sample: Any) -> list[Any]:
        """What a served sample is encoded as: itself, or parts of one that is longer than the model takes."""
        return [sample]

    def merge(self, answers: Sequence[Any]) -> Any:
        """The answer of a sample from those of the parts that `split` made of it."""
        return answers[0]

    def derive_sizes(self, sizes: dict[str, int]) -> dict[str, int]:
        """The sizes of axes of the outputs that follow from those of the inputs, which a server cuts padding by."""
        return {}

    def from_tokens(self, ids: Sequence[int]) -> Any:
        """What `parse` takes, from the ids of tokens. Raises InputError where the task does not read tokens."""
        raise InputError(f"this model is for {self.name} and takes no tokens")

    def count_tokens(self, inputs: Arrays) -> int:
        """The tokens of an encoded batch without its padding; 0 where the task does not read tokens."""
        return 0

    @property
    def generation(self) -> "GenerationSettings | None":
        """How the model writes its answers token by token; None where one run gives an answer."""
        return None

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

    @abstractmethod
    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Synthetic samples of varied lengths, to trace, warm up and time with."""

    @abstractmethod
    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        """The similarity of each answer to its reference, [samples] float64; 1 = identical."""

    def align(self, reference: Arrays, candidate: Arrays) -> Arrays:
        """The candidate's outputs in the order of the reference's, where the order within a sample says nothing."""
        return candidate

    def limit_ids(self, count: int) -> None:
        """Take no tokens with ids from `count` on, as the model has no embeddings for them."""
        return

    def check_samples(self, samples: Sequence[Any]) -> None:
        """Raise InputError for a sample that the model has no embeddings for."""
        return

    def count_cut(self, samples: Sequence[Any]) -> int:
        """How many of these samples are longer than the model takes, so that their ends are cut off."""
        return 0

    def length(self, sample: Any) -> int:
        """The length of a sample, by which samples are sorted into batches; 1 where all have the same size."""
        return 1

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        """Short fragments of samples, for calibration; none where samples have no parts.

        Samples in files are rarely as short as what users type, and short samples have the largest activations.
        """
        return []

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Random inputs to time with: `batch` samples, the free axes `length` long where the bounds allow."""
        rng = np.random.default_rng(seed)
        sizes = {"batch": batch}
        for spec in self.inputs:
            for axis in spec.shape[1:]:
                if isinstance(axis, str):
                    low, high = spec.bounds.get(axis, (1, length))
                    sizes[axis] = min(max(length, low), high)
        return {spec.name: spec.sample(rng, sizes) for spec in self.inputs}

    def timed(self, batch: int, length: int) -> Arrays:
        """The inputs of a run that is timed, by which the batch cap is found too; `typical` ones by default."""
        return self.typical(batch, length)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        """Random inputs that the model takes. sizes: the size of each free axis, by name."""
        return sample_inputs(self.inputs, sizes, seed)

    def agreements(
        self, reference: Arrays, candidate: Arrays, labels: Sequence[Any] | None = None
    ) -> Iterable["Agreement"]:
        """What the candidate's answers keep of the information in the reference's, over all samples, by the task's own
        matching; nothing more than their fidelity by default. labels: of the samples, where there are any.
        """
        return ()

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Answers that say nothing about their samples, by name: no verdict may pass them. reference: the original's.

        The fidelity of the best of them is what chance gives; the verdict asks how much better an artifact is.
        """
        return {"constant": repeat_mean(reference), "shuffled": shuffle_rows(reference)}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        """The metric of these outputs against labels, as a function of sample indices; higher is better.

        Raises InputError where the task has none.
        """
        raise InputError(f"task {self.name!r} has no metric against labels")

    def figures_from_loss(self, loss: float) -> dict[str, float]:
        """Figures that take the place of the metric, from the objective's mean loss; empty where there are none."""
        return {}

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """The distillation losses that heal a compressed model, with their weights.

        layers: whether student and teacher share layers, whose hidden states can be compared.
        """
        return {"outputs": 1.0}


def open_task(name: str, folder: Path, inputs: tuple[TensorSpec, ...]) -> Task:
    """Make the task registered under `name` from the files that its `assets` wrote to a folder.

    Raises UsageError for an unknown name, CorruptArtifact for files that are missing or not as a task writes them.
    """
    kind: type[Task] = registry.resolve("task", name)
    try:
        task = kind.from_assets(folder, inputs)
        if (folder / VOCABULARY).is_file():
            task.limit_ids(int(read_asset(folder, VOCABULARY)["ids"]))
        return task
    except (CorruptArtifact, *INTERRUPTS):
        raise
    except BaseException as error:  # whatever a crafted file makes of a tokenizer, such as a panic
        raise CorruptArtifact(
            f"{folder} does not hold the files of task {name!r}: {type(error).__name__}, "
            f"{' '.join(str(error).split())}. Compress the model again"
        ) from error


def read_asset(folder: Path, name: str) -> Any:
    """The JSON in a file of the artifact. Raises CorruptArtifact."""
    try:
        return read_json(folder / name)
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder / name} is missing. Compress the model again") from None
    except (OSError, ValueError) as error:
        raise CorruptArtifact(f"{folder / name} does not read: {error}. Compress the model again") from error


def count_outputs(config: Mapping[str, Any]) -> int:
    """How many outputs the head of a config.json has; transformers takes two where it says nothing."""
    labels = config.get("id2label")
    return len(labels) if labels else int(config.get("num_labels", 2))


def reads_waveforms(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of wav2vec 2.0 or a relative, whose heads are named as those of texts."""
    return "conv_stride" in config


def to_json(value: Any) -> bytes:
    """JSON with sorted keys and a final newline: the same value gives the same bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def first(arrays: Arrays) -> Array:
    """The first output, which answers and metrics are computed from."""
    return next(iter(arrays.values()))
