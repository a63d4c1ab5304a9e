"""AWQ of one layer: weights whose inputs are scaled up before they are rounded, and the modules before them down.

A checkpoint has no place for a division, as the graph of an artifact has. So the factors are divided out of what
computes an input: a norm, or a linear module, as the values before the product at the end of attention.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from compress.out_of_core.layer_loop import LayerLoop, observe_linear_inputs
from compress.out_of_core.layer_rounding import InputMoments, find_linear
from compress.quantize.awq_scales import find_scales
from compress.quantize.plan_rounding import RoundingConfig
from laconic.arrays import Array

TOKENS = 32
"""Of the text on which a layer must compute the same with factors as without."""
TOLERANCE = 1e-4
"""Of the largest output by which it may differ. Factors that do not cancel change it by a multiple of itself."""


@dataclass(frozen=True)
class InputSource:
    """What computes an input of linear modules, and can be divided by its factors.

    path: of the module in its layer. outputs: the output of the module that each channel of the input comes from; heads
    that share values come from the same ones. offset: what is added to the weight of a norm before it multiplies: 1 in
    Gemma.
    """

    path: str
    outputs: Array
    offset: float = 0.0


@dataclass(frozen=True)
class LayerScales:
    """divisors: by the path of a linear module, what its outputs are to be divided by after it is rounded, [out].
    changed: the names of other parameters that have changed. unscaled: modules whose input nothing takes factors for.
    """

    divisors: dict[str, Array] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)


def scale_layer(
    loop: LayerLoop, number: int, hidden: Tensor, moments: InputMoments, rounded: frozenset[str],
    config: RoundingConfig,
) -> LayerScales:  # fmt: skip
    """Multiply the weights of a layer, which is loaded, by the factors of their inputs, and divide norms by them.

    hidden: what the layer reads of one text, [1, tokens, width]. moments: of the inputs of its linear modules, which
    are taken. rounded: the linear modules that are rounded; no other one changes.
    """
    layer, scales = loop.layers[number], LayerScales()
    linear = find_linear(layer)
    groups = [paths for paths in moments.group_paths() if rounded.issuperset(paths)]
    sources = find_sources(loop, number, hidden[:, :TOKENS], groups, rounded)
    for paths, gram in moments.take_means():
        source = sources.get(paths[0])
        if source is None:
            scales.unscaled.extend(paths if paths in groups else [])
            continue
        readers = [linear[path] for path in paths]
        factors = find_scales([reader.weight.numpy().T for reader in readers], gram, config, source.outputs)
        if factors is None:
            continue
        multiply_inputs(readers, factors)
        module = layer.get_submodule(source.path)
        divisors = spread_factors(factors, source, module)
        scales.changed.extend(f"{source.path}.{name}" for name in divide_module(module, divisors, source.offset))
        if isinstance(module, nn.Linear):
            scales.divisors[source.path] = divisors
    return scales


def find_sources(
    loop: LayerLoop, number: int, hidden: Tensor, groups: Sequence[list[str]], rounded: Collection[str]
) -> dict[str, InputSource]:
    """Find what computes the inputs of linear modules and can be divided by factors, by the first path of each group of
    modules that share an input; none for those where the layer would compute something else."""
    linear = find_linear(loop.layers[number])
    expected, norms, order = observe_layer(loop, number, hidden)
    sources: dict[str, InputSource] = {}
    for paths in groups:
        readers = [linear[path] for path in paths]
        before = [path for path in order[: order.index(paths[0])] if path in rounded] if paths[0] in order else []
        for source in list_sources(loop, linear, norms.get(paths[0]), before, readers[0].in_features):
            if cancels_factors(loop, number, source, readers, hidden, expected):
                sources[paths[0]] = source
                break
    return sources


def observe_layer(loop: LayerLoop, number: int, hidden: Tensor) -> tuple[Tensor, dict[str, str], list[str]]:
    """Run a layer on a text; return what it makes of it, the norm whose output each linear module reads, by path, and
    the linear modules in the order in which they run."""
    outputs: list[tuple[Tensor, str]] = []
    norms: dict[str, str] = {}
    order: list[str] = []

    def observe(path: str, read: Tensor) -> None:
        order.append(path)
        # The tensors are all referenced, so that none has the memory of an earlier one.
        norms.update((path, name) for made, name in outputs if made.data_ptr() == read.data_ptr())

    handles = [
        module.register_forward_hook(lambda module, args, made, path=path: outputs.append((made, path)))
        for path, module in loop.layers[number].named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 1
    ]
    try:
        with observe_linear_inputs(loop.layers[number], observe):
            return loop.run(number, hidden), norms, order
    finally:
        for handle in handles:
            handle.remove()


def list_sources(
    loop: LayerLoop, linear: Mapping[str, nn.Linear], norm: str | None, before: Sequence[str], channels: int
) -> Iterator[InputSource]:
    """List what may compute an input of so many channels: its norm, or linear modules that ran before, the last ones
    first."""
    if norm is not None:
        yield from (InputSource(norm, np.arange(channels), offset) for offset in (0.0, 1.0))
        return
    config = loop.model.model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for path in reversed(before):
        outputs = linear[path].out_features
        if outputs == channels:
            yield InputSource(path, np.arange(channels))
        elif channels % outputs == 0 and outputs % width == 0:
            head, place = np.divmod(np.arange(channels), width)
            yield InputSource(path, head // (channels // outputs) * width + place)


def cancels_factors(
    loop: LayerLoop, number: int, source: InputSource, readers: Sequence[nn.Linear], hidden: Tensor, expected: Tensor
) -> bool:
    """Return whether a layer computes the same with arbitrary factors that its source is divided by."""
    module = loop.layers[number].get_submodule(source.path)
    factors = 2.0 ** np.random.default_rng(0).integers(-1, 2, source.outputs.max() + 1)  # multiplied without rounding
    factors = factors[source.outputs].astype(np.float32)
    with restored([module, *readers]):
        multiply_inputs(readers, factors)
        divisors = spread_factors(factors, source, module)
        divide_module(module, divisors, source.offset)
        if isinstance(module, nn.Linear):
            module.weight = make_parameter(module.weight / torch.from_numpy(divisors)[:, None])
        made = loop.run(number, hidden)
    return torch.allclose(made, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give modules back the parameters that they had before the body."""
    before = [dict(module.named_parameters(recurse=False)) for module in modules]
    try:
        yield
    finally:
        for module, parameters in zip(modules, before, strict=True):
            for name, parameter in parameters.items():
                setattr(module, name, parameter)


def spread_factors(factors: Array, source: InputSource, module: nn.Module) -> Array:
    """Return what the outputs of a source are to be divided by, [out] float32."""
    divisors = np.ones(module.get_parameter("weight").shape[0], np.float32)
    divisors[source.outputs] = factors
    return divisors


def multiply_inputs(readers: Sequence[nn.Linear], factors: Array) -> None:
    """Multiply the weights of each input of linear modules by its factor."""
    for reader in readers:
        reader.weight = make_parameter(reader.weight * torch.from_numpy(factors))


def divide_module(module: nn.Module, divisors: Array, offset: float) -> list[str]:
    """Divide the weight of a norm, or the bias of any module, and return the names of those that changed. The weight of
    a linear module is divided after it is rounded, by its scales."""
    changed = [] if isinstance(module, nn.Linear) else ["weight"]
    changed += ["bias"] if getattr(module, "bias", None) is not None else []
    for name in changed:
        added = offset if name == "weight" else 0.0
        values = (module.get_parameter(name) + added) / torch.from_numpy(divisors) - added
        setattr(module, name, make_parameter(values))
    return changed


def make_parameter(values: Tensor) -> nn.Parameter:
    """Make a parameter that is not trained."""
    return nn.Parameter(values, requires_grad=False)
