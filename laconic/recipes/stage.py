"""The interface of a stage: a frozen settings model with the method that applies it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from laconic import registry
from laconic.arrays import Array
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.hashing import digest_own_code, environment_digest, hash_of
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, PrecisionLadder

if TYPE_CHECKING:
    from torch import nn

    from laconic.models.checkpoint import Checkpoint
    from laconic.tasks.task import Task


@dataclass(frozen=True)
class Context:
    """What a stage may use besides the model.

    key: digest of the stage and of everything that its result depends on. folder: scratch, removed when the run ends.
    train, calibrate, choose: samples for training, for calibration, and for validation, by which choices are made; the
    test samples are not available to stages.
    """

    task: "Task"
    key: str
    seed: int
    folder: Path
    cache: Cache
    steps: Steps
    train: Dataset
    calibrate: Dataset
    choose: Dataset


@dataclass(frozen=True)
class TorchContext(Context):
    """The context of a stage that changes the torch module.

    original: the original model, teacher and reference, which must not be modified. fidelity: measures the fidelity of
    a checkpoint's outputs to the original's, per sample of `choose`: [samples]. work: a folder for training snapshots
    that survives an interruption; it is removed when the stage is done.
    """

    original: "Checkpoint"
    fidelity: Callable[["Checkpoint"], Array]
    work: Path


@dataclass(frozen=True)
class PlanContext(Context):
    """The context of a stage that plans quantization.

    trial: builds a plan and measures the divergence of its outputs from the original's, per sample of a small part of
    `choose`: [samples]. history: records of the stages before capture whose effects are intact. int8_saturates: whether
    the target is this machine's processor, and its INT8 kernels may saturate.
    """

    trial: Callable[[Plan], Array]
    history: tuple[Record, ...] = ()
    int8_saturates: bool = False


Property = Literal["zeros", "ranges", "factors"]
"""A property of a model that a stage makes and later stages must preserve.

zeros: sparse weights that must stay zero. ranges: activation ranges learned together with the weights (QAT). factors:
layers replaced by low-rank factors, so that the structure of their transformer block is no longer recognized.
"""


class Stage(BaseModel, ABC):
    """A stage of a recipe. Its fields are its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[Literal["torch", "plan"]]

    makes: ClassVar[frozenset[Property]] = frozenset()
    """Properties that the stage gives the model, and that later stages must preserve."""

    breaks: ClassVar[frozenset[Property]] = frozenset()
    """Properties that the stage destroys, or that it cannot handle."""


class TorchStage(Stage):
    """A stage that changes the torch module of a checkpoint, before capture."""

    kind = "torch"

    lossy: ClassVar[bool] = False
    """Whether the stage lowers fidelity enough that healing after it may pay off."""

    trains: ClassVar[bool] = False
    """Whether the stage trains the model, and so heals the loss of the stages before it."""

    teaches: ClassVar[bool] = False
    """Whether the stage changes outputs on purpose (fine-tuning): its result is the reference for the later stages and
    for the verdict."""

    @abstractmethod
    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        """Return the changed checkpoint, with one more Record in its history."""

    @staticmethod
    @abstractmethod
    def rebuild(module: "nn.Module", record: Record) -> None:
        """Replay the structural change on an unchanged module, so that the saved weights fit."""

    def make_record(
        self,
        name: str,
        checkpoint: "Checkpoint",
        context: TorchContext,
        figures: dict[str, float],
        structure: dict[str, Any] | None = None,
    ) -> Record:
        """Make the record of this stage for a checkpoint's history. name: the stage's. structure: for `rebuild`."""
        config, data = dump_settings(self), (context.calibrate.fingerprint, context.train.fingerprint)
        key = hash_of(context.key, checkpoint.key, name, config, environment_digest(), data, context.seed)
        return Record(stage=name, config=config, key=key, figures=figures, structure=structure or {})


class PlanStage(Stage):
    """A stage that plans how the captured graph is quantized."""

    kind = "plan"

    rounds_layers: ClassVar[bool] = False
    """Whether the stage can round the weights of a language model a layer at a time, without a graph, and so write a
    checkpoint."""

    @abstractmethod
    def plan(self, graph: Graph, context: PlanContext) -> PrecisionLadder:
        """Propose plans, the fastest first; for each engine the first that meets the goal is taken."""


def dump_settings(stage: Stage) -> dict[str, Any]:
    """Dump the settings of a stage, JSON-ready."""
    return stage.model_dump(mode="json")


def describe_stage(name: str, stage: Stage) -> list[Any]:
    """Describe a stage for the key of its result, JSON-ready: its name, its settings, and code of the user's own."""
    settings = dump_settings(stage)
    modules = [address.partition(":")[0] for address in find_addresses(settings)]
    return [name, settings, digest_own_code([type(stage).__module__, *modules])]


def find_addresses(settings: Any) -> Iterator[str]:
    """Yield the addresses of code, "package.module:object", in settings."""
    if isinstance(settings, str):
        if ":" in settings:
            yield settings
    elif isinstance(settings, (list, dict)):
        for value in settings.values() if isinstance(settings, dict) else settings:
            yield from find_addresses(value)


def find_made_properties(record: Record) -> frozenset[Property]:
    """Find the properties that the stage of a record gave the model."""
    made: frozenset[Property] = getattr(registry.resolve("stage", record.stage), "makes", frozenset())
    return made


def find_intact_records(history: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records of a history, without those whose properties a later stage has destroyed."""
    breaks: list[frozenset[Property]] = [
        getattr(registry.resolve("stage", record.stage), "breaks", frozenset()) for record in history
    ]
    return tuple(
        record
        for place, record in enumerate(history)
        if not find_made_properties(record) & frozenset[Property]().union(*breaks[place + 1 :])
    )
