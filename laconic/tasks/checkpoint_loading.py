"""The checkpoints that a task is for."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from laconic.errors import SourceError, UsageError
from laconic.tasks.named_task import NamedTask

if TYPE_CHECKING:
    from laconic.tasks.decoder_tensors import CacheShape
    from laconic.tasks.preprocessing import Preprocessing
    from laconic.tensor import TensorSpec

DEFAULT_TASK = "tensors"
"""The task of a module or a graph where none is named."""


class CheckpointLoading(NamedTask):
    """Which checkpoints a task is for, and what class of transformers builds them."""

    auto_class: ClassVar[str | None] = None
    """The Auto class of transformers that builds the model; None where the task is not for models of transformers."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The endings of the architecture names in a config.json that are for this task."""

    has_class_head: ClassVar[bool] = False
    """Whether the model's outputs depend on the labels, so that other labels need a new head."""

    default_recipe: ClassVar[str] = ""
    """The ready recipe by which such a model is compressed for the CPU where no stages are named; "": the stages of
    the target."""

    problem_type: ClassVar[str | None] = None
    """What the config.json of a new head says of its labels; None where it says nothing."""

    @classmethod
    def from_signature(cls, inputs: "tuple[TensorSpec, ...]") -> Self:
        """Return the task of a plain module or graph with these inputs, without a tokenizer or image settings.

        Raises SourceError where the task needs more than the inputs.
        """
        raise SourceError(f"task {cls.name!r} needs a tokenizer. Choose a task that reads arrays, as {DEFAULT_TASK}")

    @classmethod
    def from_preprocessing(cls, preprocessing: "Preprocessing") -> Self:
        """Return the task of a checkpoint of transformers; every task with an `auto_class` has this."""
        raise SourceError(f"task {cls.name!r} is not for models of transformers. Give the model with a --builder")

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a model with this config.json, of one of the `architectures`, can be for this task."""
        return True

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a model with this config.json, of one of the `architectures`, is for this task by default."""
        return cls.fits(config)

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        """Return the classes of a new head for these labels of rows; empty where a head with the classes `known` has
        them all.

        Asked where `has_class_head`. Raises DataError for labels that are not for this task.
        """
        return ()

    def with_cache(self, shape: "CacheShape | None") -> Self:
        """Return the same task for a model whose cache of keys and values has another shape. shape: None for a model
        without one. Models of other tasks have none that changes."""
        return self

    def describe_limit(self) -> str | None:
        """Describe what this model cannot do that others of the task can; None for nothing."""
        return None

    def with_chat_template(self, text: str) -> Self:
        """Return the same task for a model with another chat template. Raises UsageError where samples are no chats."""
        raise UsageError(f"a chat_template is for language models, and this model is for {self.name}. Leave it out")


def count_outputs(config: Mapping[str, Any]) -> int:
    """Return how many outputs the head of a config.json has; transformers takes two where it says nothing."""
    labels = config.get("id2label")
    return len(labels) if labels else int(config.get("num_labels", 2))


def reads_waveforms(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of wav2vec 2.0 or a relative, whose heads are named as those of texts."""
    return "conv_stride" in config
