"""A stage of a pipeline whose passes are phases of a step, and what stages read during one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import PipelineStage

from train.step.objective import Batch
from train.step.parallel_strategy import SteppedModel


@dataclass(frozen=True)
class StepInputs:
    """What the stages read during a step. batches: the micro-batches, the largest first. total: what the summed loss is
    divided by. state: the model in training."""

    batches: Sequence[Batch]
    total: float
    state: SteppedModel

    @contextmanager
    def enter_forward(self) -> Iterator[None]:
        """Enter what the forward pass of a micro-batch is run in."""
        with self.state.phase("forward"), self.state.forward_context():
            yield


class ObservedStage(PipelineStage):
    """A stage of torch that enters the phase "stage N" for each of its passes, and "backward" in it; the forward pass
    enters its own."""

    def __init__(self, *args: Any, phase: Callable[[str], AbstractContextManager[Any]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._phase = phase

    def forward_one_chunk(self, *args: Any, **settings: Any) -> Any:
        with self._phase(f"stage {self.stage_index}"):
            return super().forward_one_chunk(*args, **settings)

    def backward_one_chunk(self, *args: Any, **settings: Any) -> Any:
        with self._phase(f"stage {self.stage_index}"), self._phase("backward"):
            return super().backward_one_chunk(*args, **settings)

    def backward_weight_one_chunk(self, *args: Any, **settings: Any) -> Any:
        with self._phase(f"stage {self.stage_index}"), self._phase("backward"):
            return super().backward_weight_one_chunk(*args, **settings)
