"""The interface of an optimizer in a recipe, and how the parameters of a model are grouped for it."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

Groups = list[dict[str, Any]]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(BaseModel, ABC):
    """The settings of an optimizer. What it needs and keeps to is data, for the planner and the table of legality.

    library: the package that it is from beside torch, None without one. per_parameter: whether stepping one parameter
    at a time, as an optimizer in the backward pass does, gives the same result. exact: the arithmetic is torch's own
    SGD or AdamW in FP32. dtensor: whether it takes parameters sharded by FSDP2. caution: what it was measured to lose.
    smaller: the registered variant with less state that the memory planner tries in its place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: ClassVar[str | None] = None
    per_parameter: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    dtensor: ClassVar[bool] = False
    caution: ClassVar[str | None] = None
    smaller: ClassVar[str | None] = None

    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    @abstractmethod
    def build(self, groups: Groups) -> TorchOptimizer:
        """Build the optimizer over the groups of parameters; a group may carry its own `lr` and `weight_decay`.

        Raises MissingPackage where its library is not installed.
        """


def parameter_groups(module: nn.Module, weight_decay: float) -> Groups:
    """Group the parameters that learn, each once, in the order of the module: those that decay and those that do not.

    Biases and the weights of normalisations, which have fewer than two axes, do not decay: it would only pull them from
    where they belong. A group without members is left out.
    """
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in learning if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in learning if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
