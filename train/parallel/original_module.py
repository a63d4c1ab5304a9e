"""What a module was before its parameters were spread over ranks, to make it so again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class OriginalModule:
    """A module before it is sharded: its class, its own parameters, its hooks and the names of its attributes."""

    module: nn.Module
    kind: type[nn.Module]
    parameters: Mapping[str, nn.Parameter]
    hooks: Mapping[str, Any]
    names: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> "OriginalModule":
        """Record a module as it is now."""
        hooks = {name: value.copy() for name, value in vars(module).items() if name.endswith("hooks")}
        return cls(module, type(module), dict(module.named_parameters(recurse=False)), hooks, frozenset(vars(module)))

    def release(self) -> set[str]:
        """Free the memory of the original parameters; gives the names of the attributes that sharding has added.

        The parameters stay the same objects, for whoever holds them.
        """
        for parameter in self.parameters.values():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.new_empty(0)
        return set(vars(self.module)) - self.names

    def restore(self, added: set[str]) -> None:
        """Restore the module with its trained parameters, whole on every rank. added: as `release` gave it."""
        restored = dict(self.parameters)
        for name, parameter in self.parameters.items():
            trained: Any = getattr(self.module, name)
            if trained is parameter:  # a shared one, which has come back with another module
                continue
            whole = trained.full_tensor() if isinstance(trained, DTensor) else trained
            if isinstance(parameter, DTensor):  # in parts before it was sharded: whoever made the parts has the whole
                restored[name] = nn.Parameter(whole.detach(), requires_grad=parameter.requires_grad)
            else:
                parameter.data = whole.detach()
        self.module.__class__ = self.kind
        for name in added:
            delattr(self.module, name)
        for name, hooks in self.hooks.items():
            setattr(self.module, name, hooks)
        for name, parameter in restored.items():
            setattr(self.module, name, parameter)
