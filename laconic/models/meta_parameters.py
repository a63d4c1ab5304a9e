"""Modules that are built without memory for their parameters, which come from a file afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def keep_parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module registers in the body on the meta device. Buffers, as the frequencies of rotary
    embeddings, are computed as ever: no file has them."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_complete(module: nn.Module) -> bool:
    """Return whether no parameter, buffer or other tensor of a module is on the meta device."""
    return not any(
        isinstance(value, Tensor) and value.is_meta
        for part in module.modules()
        for value in (*part.parameters(recurse=False), *part.buffers(recurse=False), *vars(part).values())
    )
