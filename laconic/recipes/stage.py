"""The interface of a stage: a frozen config that sits beside the code it drives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from laconic import registry
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Ladder, Plan
from laconic.tasks.task import Task
from laconic.tensor import Array

if TYPE_CHECKING:
    from torch import nn

    from laconic.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Context:
    """What a stage may use beside the model.

    key: digest of everything before the stage, and of the stage. folder: scratch, gone when the run ends. train,
    calibrate, choose: samples for learning from, for looking at, and for deciding by; no others may be touched.
    """

    task: Task
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
    """original: the model as it came, which is teacher and reference; never to be changed. fidelity: of a checkpoint's
    answers to the original's, per sample of `choose`. work: a folder that outlives an interrupted run, for snapshots of
    training; it is removed when the stage is done."""

    original: "Checkpoint"
    fidelity: Callable[["Checkpoint"], Array]
    work: Path


@dataclass(frozen=True)
class PlanContext(Context):
    """trial: builds a plan for the target, and gives the fidelity of its answers to the original's, per sample of a few
    of `choose`. history: what was done to the model before it was captured, and still stands."""

    trial: Callable[[Plan], Array]
    history: tuple[Record, ...] = ()


Property = Literal["zeros", "ranges", "factors"]
"""zeros: weights that are zero, and stay so. ranges: of activations, learned together with the weights. factors: two
layers in the place of one of a block, so that the block is no longer known."""


class Stage(BaseModel, ABC):
    """A step of a recipe. Its fields are the knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[Literal["torch", "plan"]]

    makes: ClassVar[frozenset[Property]] = frozenset()
    """What it gives a model that later stages have to leave in place."""

    breaks: ClassVar[frozenset[Property]] = frozenset()
    """What a model does not keep through it, or what it cannot work on."""


class TorchStage(Stage):
    """Changes the checkpoint, before it is captured."""

    kind = "torch"

    lossy: ClassVar[bool] = False
    """Whether answers suffer so that healing afterwards may pay."""

    trains: ClassVar[bool] = False
    """Whether it trains the model, so that what a stage before it has harmed heals here."""

    teaches: ClassVar[bool] = False
    """Whether answers are meant to differ: what it makes is what everything is compared with from there on."""

    @abstractmethod
    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        """The changed checkpoint, with one more Record in its history."""

    @staticmethod
    @abstractmethod
    def rebuild(module: "nn.Module", record: Record) -> None:
        """Replay the structural change on a module that has not been through it, so that the weights fit."""


class PlanStage(Stage):
    """Decides how the captured graph is quantized."""

    kind = "plan"

    @abstractmethod
    def plan(self, graph: Graph, context: PlanContext) -> Ladder:
        """Plans from the fastest to the most faithful; the first that meets the goal is taken, for each engine."""


def dump_settings(stage: Stage) -> dict[str, Any]:
    """The stage's settings, JSON-ready."""
    return stage.model_dump(mode="json")


def find_made_properties(record: Record) -> frozenset[Property]:
    """What a step has given the model that later steps have to leave in place."""
    made: frozenset[Property] = getattr(registry.resolve("stage", record.stage), "makes", frozenset())
    return made


def find_intact_records(history: Sequence[Record]) -> tuple[Record, ...]:
    """The steps of a history, without those whose properties a later step has broken."""
    breaks: list[frozenset[Property]] = [
        getattr(registry.resolve("stage", record.stage), "breaks", frozenset()) for record in history
    ]
    return tuple(
        record
        for place, record in enumerate(history)
        if not find_made_properties(record) & frozenset[Property]().union(*breaks[place + 1 :])
    )
