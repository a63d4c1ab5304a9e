"""The choice of how transformers models compute a part, such as their attention, for as long as they are captured."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


@contextmanager
def select_implementation(module: nn.Module, setting: str, name: str) -> Iterator[None]:
    """Within the context, the transformers models inside the module compute a part by the function of this name.

    setting: the attribute of their configs that holds the name, such as `_attn_implementation`. name: under which the
    function is registered with transformers.
    """
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    before = [getattr(each.config, setting) for each in models]
    for each in models:
        setattr(each.config, setting, name)
    try:
        yield
    finally:
        for each, found in zip(models, before, strict=True):
            setattr(each.config, setting, found)
