"""The modules that a training step trains: the model, and what an objective learns in addition to it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.optimizers.optimizer import Groups

if TYPE_CHECKING:
    from laconic.models.adapter import Adapter


class TrainedModules:
    """The model in training mode, further modules whose parameters are trained with it, and how to undo changes.

    model: its forward computation may be changed by techniques, the names of its parameters may not. adapter: what was
    trained, where a technique keeps it apart from the weights; set when the changes are undone.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.adapter: Adapter | None = None
        self._extra: dict[str, nn.Module] = {}
        self._undo: list[Callable[[], None]] = []
        self._refresh: list[Callable[[], None]] = []
        self._merges: list[Callable[[dict[str, Tensor]], None]] = []

    def add(self, name: str, module: nn.Module) -> None:
        """Train a further module (the learned ranges of a quantizer, the projections of a distillation loss).

        name: prefix of its tensors in `weights`.
        """
        self._extra[name] = module

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when training is over; the last change is undone first."""
        self._undo.append(undo)

    def on_load(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` when weights were loaded from a snapshot: for copies of them in another place or dtype."""
        self._refresh.append(refresh)

    def on_merge(self, merge: Callable[[dict[str, Tensor]], None]) -> None:
        """Call `merge` where the weights of the model without techniques are asked for: it adds those that it keeps in
        another form, under their own names."""
        self._merges.append(merge)

    def refresh_copies(self) -> None:
        """Update the copies of weights after these were loaded."""
        for refresh in self._refresh:
            refresh()

    def parameter_groups(self, group: Callable[[nn.Module], Groups]) -> Groups:
        """Group the model's parameters, then those of each further module."""
        return [group_ for module in (self.model, *self._extra.values()) for group_ in group(module)]

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by name: the model's, and those of further modules under their prefixes."""
        weights = dict(self.model.state_dict())
        for prefix, module in self._extra.items():
            weights |= {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
        return weights

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """Return the weights as the model has them without techniques, which stay as they are."""
        weights = self.weights()
        for merge in self._merges:
            merge(weights)
        return weights

    def restore(self) -> nn.Module:
        """Undo every change, and return the model with its trained weights."""
        while self._undo:
            self._undo.pop()()
        return self.model


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """List the parameters that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
