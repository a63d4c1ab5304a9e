"""The repeated layers of a model: the blocks of a transformer, the stages of a convolutional network."""

from torch import nn


def find_layer_lists(module: nn.Module, *, least: int = 2) -> tuple[nn.Module, ...]:
    """Find the outermost ModuleLists and Sequentials of `least` or more modules of one class that have submodules."""
    lists: list[nn.Module] = []

    def walk(parent: nn.Module) -> None:
        for child in parent.children():
            members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
            is_uniform = len(members) >= least and len({type(member) for member in members}) == 1
            if is_uniform and any(True for _ in members[0].children()):
                lists.append(child)
            else:
                walk(child)

    walk(module)
    return tuple(lists)


def find_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated layers of a model, in order."""
    return tuple(layer for layers in find_layer_lists(module) for layer in layers.children())
