"""Forward hooks on chosen layers of a model, for the duration of a `with` block."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

Before = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with a layer's path, the layer and its arguments. What it returns, `(args, kwargs)` or None, replaces
those."""

After = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
"""Called with a layer's path, the layer, its arguments and its output. What it returns, unless None, replaces the
output."""


@contextmanager
def forward_hooks(
    module: nn.Module, paths: Iterable[str], *, before: Before | None = None, after: After | None = None
) -> Iterator[None]:
    """Call `before` and `after` around each forward pass of the layers at these paths, inside the `with` block.

    The hooks are removed at its end, also when it is left by an exception. Raises AttributeError for a path that the
    module does not have.
    """
    with ExitStack() as stack:
        for path in paths:
            layer = module.get_submodule(path)
            if before is not None:
                handle = layer.register_forward_pre_hook(partial(before, path), with_kwargs=True)
                stack.callback(handle.remove)
            if after is not None:
                stack.callback(layer.register_forward_hook(partial(after, path), with_kwargs=True).remove)
        yield
