"""ONNX operators in PyTorch, for the engine `torch`: a function each, called with the inputs and the attributes.

Shapes and what is computed of them stay Python's own numbers: an int, a float or a bool for a tensor without axes, a
list for one with a single axis. So torch.compile sees sizes and no data, and compiles one program for all of them.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Types of elements by their number in onnx.proto."""

Value = Any
"""A tensor, or a Python number or list of them."""


def as_tensor(value: Value) -> Tensor:
    """A value as a tensor: int64, bool, or float32."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        return torch.stack([as_tensor(each) for each in value]) if value else torch.empty(0, dtype=torch.int64)
    dtype = torch.float32 if isinstance(value, float) else torch.bool if isinstance(value, bool) else torch.int64
    return torch.scalar_tensor(value, dtype=dtype)


def as_list(value: Value) -> list[Any]:
    """Sizes or axes as Python's own numbers."""
    if isinstance(value, Tensor):
        return [int(each) for each in value.flatten()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def binary(function: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    """An operator of two inputs, broadcast."""

    def run(left: Value, right: Value) -> Value:
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            # A number beside a tensor stays one: the compiler writes it into the kernel.
            left, right = (as_tensor(each) if isinstance(each, list) else each for each in (left, right))
            return function(left, right)
        if isinstance(left, list) and isinstance(right, list):
            count = max(len(left), len(right))
            pairs = zip(left * (count if len(left) == 1 else 1), right * (count if len(right) == 1 else 1), strict=True)
            return [function(a, b) for a, b in pairs]
        if isinstance(left, list):
            return [function(each, right) for each in left]
        return [function(left, each) for each in right] if isinstance(right, list) else function(left, right)

    return run


def unary(function: Callable[[Tensor], Tensor]) -> Callable[[Value], Tensor]:
    """An operator of one tensor."""

    def run(x: Value) -> Tensor:
        return function(as_tensor(x))

    return run


def divide(left: Any, right: Any) -> Any:
    """Division; of integers it cuts off."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        whole = not any(
            each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in (left, right)
        )
        return torch.div(left, right, rounding_mode="trunc" if whole else None)
    return left / right if isinstance(left, float) else left // right


def reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reduction over axes, all of them where none are given."""

    def run(
        x: Tensor, axes: Value = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0, **attributes: Any
    ) -> Tensor:
        given = as_list(axes if axes is not None else attributes.get("axes", []))
        if not given and noop_with_empty_axes:
            return x
        return function(x, given or list(range(x.ndim)), keepdim=bool(keepdims))

    return run


def cast(x: Value, *, to: int, saturate: int = 1) -> Value:
    """Cast; a size stays one unless floats are asked for."""
    if not isinstance(x, Tensor) and DTYPES[to] in (torch.int64, torch.int32):
        return [int(each) for each in x] if isinstance(x, list) else int(x)
    return as_tensor(x).to(DTYPES[to])


def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> list[int]:
    """The sizes of a tensor."""
    return list(x.shape[start:end])


def gather(x: Value, indices: Value, *, axis: int = 0) -> Value:
    """Rows, or other slices, by number."""
    if not isinstance(x, Tensor) and not isinstance(indices, Tensor):
        return [x[each] for each in indices] if isinstance(indices, list) else x[indices]
    x, axis = as_tensor(x), axis % as_tensor(x).ndim
    if isinstance(indices, int):
        return x.select(axis, indices)
    found = as_tensor(indices)
    found = torch.where(found < 0, found + x.shape[axis], found)
    if axis == 0 and x.ndim == 2:
        return functional.embedding(found, x)
    rows = x.index_select(axis, found.flatten())
    return rows.reshape([*x.shape[:axis], *found.shape, *x.shape[axis + 1 :]])


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Elements by number along an axis."""
    indices = as_tensor(indices)
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Slices by their place along the first axes."""
    if batch_dims:
        raise NotImplementedError("GatherND with batch_dims")
    return x[tuple(as_tensor(indices).unbind(-1))]


def concat(*parts: Value, axis: int) -> Value:
    """Join along an axis."""
    if any(isinstance(part, Tensor) for part in parts):
        return torch.cat([as_tensor(part) for part in parts], axis)
    return [each for part in parts for each in part]


def reshape(x: Value, sizes: Value, *, allowzero: int = 0) -> Value:
    """Another shape; -1 is what is left, 0 the size that the axis has."""
    sizes = as_list(sizes)
    if not isinstance(x, Tensor) and len(sizes) < 2:
        return as_list(x) if sizes else as_list(x)[0]
    x = as_tensor(x)
    if not allowzero:
        sizes = [x.shape[place] if isinstance(size, int) and size == 0 else size for place, size in enumerate(sizes)]
    return x.reshape(sizes)


def unsqueeze(x: Value, axes: Value) -> Value:
    """New axes of size 1."""
    places = as_list(axes)
    if not isinstance(x, (Tensor, list)) and len(places) == 1:
        return [x]
    x = as_tensor(x)
    rank = x.ndim + len(places)
    for place in sorted(each % rank for each in places):
        x = x.unsqueeze(place)
    return x


def squeeze(x: Value, axes: Value = None) -> Value:
    """Without axes of size 1."""
    if isinstance(x, list):
        return x[0]
    return x.squeeze() if axes is None else x.squeeze(tuple(as_list(axes)))


def slice_axes(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    """Slices along axes; a negative step goes backwards."""
    begin, stop = as_list(starts), as_list(ends)
    places = as_list(axes) if axes is not None else list(range(len(begin)))
    strides = as_list(steps) if steps is not None else [1] * len(begin)
    for place, low, high, step in zip(places, begin, stop, strides, strict=True):
        if isinstance(x, list):
            x = x[low:high:step]
        elif step > 0:
            x = x[(slice(None),) * (place % x.ndim) + (slice(low, high, step),)]
        elif (low, step) == (-1, -1) and high < -(2**31):
            x = x.flip(place)
        else:
            raise NotImplementedError("Slice with a negative step over a part of an axis")
    return x


def split(x: Tensor, sizes: Value = None, *, axis: int = 0, num_outputs: int = 0) -> Sequence[Tensor]:
    """Parts along an axis."""
    return torch.split(x, as_list(sizes), axis) if sizes is not None else torch.chunk(x, num_outputs, axis)


def where(condition: Value, left: Value, right: Value) -> Value:
    """Elements of one or the other."""
    if not any(isinstance(each, Tensor) for each in (condition, left, right)):
        count = max(len(as_list(each)) for each in (condition, left, right))
        lists = (as_list(each) * (count if len(as_list(each)) == 1 else 1) for each in (condition, left, right))
        found = [a if chosen else b for chosen, a, b in zip(*lists, strict=True)]
        return found if any(isinstance(each, list) for each in (condition, left, right)) else found[0]
    left, right = (as_tensor(each) if isinstance(each, list) else each for each in (left, right))
    return torch.where(as_tensor(condition), left, right)


def expand(x: Value, sizes: Value) -> Tensor:
    """Broadcast to a shape, where 1 keeps the size that an axis has."""
    tensor, wanted = as_tensor(x), as_list(sizes)
    wanted = [1] * (tensor.ndim - len(wanted)) + wanted
    own = [1] * (len(wanted) - tensor.ndim) + list(tensor.shape)
    return tensor.expand(
        [have if isinstance(want, int) and want == 1 else want for want, have in zip(wanted, own, strict=True)]
    )


def make_range(start: Value, limit: Value, delta: Value) -> Tensor:
    """Numbers in steps."""
    bounds = [each.item() if isinstance(each, Tensor) else each for each in (start, limit, delta)]
    return torch.arange(*bounds)


def fill(sizes: Value, *, value: Tensor | None = None) -> Value:
    """A tensor of one number; of a list, Python's own."""
    wanted = as_list(sizes)
    number = 0.0 if value is None else value.item()
    if len(wanted) == 1 and isinstance(number, int) and not isinstance(number, bool) and isinstance(wanted[0], int):
        return [number] * wanted[0]
    return torch.full(wanted, number, dtype=torch.float32 if value is None else value.dtype)


def pad(x: Tensor, pads: Value, value: Value = 0.0, axes: Value = None, *, mode: str = "constant") -> Tensor:
    """Padding at the ends of axes."""
    amounts = as_list(pads)
    places = as_list(axes) if axes is not None else list(range(x.ndim))
    before, after = [0] * x.ndim, [0] * x.ndim
    for number, place in enumerate(places):
        before[place], after[place] = amounts[number], amounts[number + len(places)]
    flat = [size for place in reversed(range(x.ndim)) for size in (before[place], after[place])]
    if mode == "constant":
        return functional.pad(x, flat, value=value.item() if isinstance(value, Tensor) else value or 0.0)
    while flat[-2:] == [0, 0]:
        del flat[-2:]
    return functional.pad(x, flat, mode={"edge": "replicate", "wrap": "circular"}.get(mode, mode))


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """Layer normalization from an axis on."""
    return functional.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def clip(x: Tensor, low: Value = None, high: Value = None) -> Tensor:
    """Limits below and above."""
    low, high = (each.item() if isinstance(each, Tensor) else each for each in (low, high))
    return x if low is None and high is None else x.clamp(low, high)


def cumulate(x: Tensor, axis: Value, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sums up to each place."""
    place = int(as_list(axis)[0])
    found = x.flip(place).cumsum(place, dtype=x.dtype).flip(place) if reverse else x.cumsum(place, dtype=x.dtype)
    return found - x if exclusive else found


def pick_largest(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The number of the largest element."""
    if select_last_index:
        raise NotImplementedError("ArgMax with select_last_index")
    return x.argmax(axis, keepdim=bool(keepdims))


def quantize(x: Tensor, scale: Value, zero: Tensor, *, axis: int = 1) -> Tensor:
    """The integers of a tensor, with one scale."""
    limits = torch.iinfo(zero.dtype)
    steps = (x / as_tensor(scale)).round() + zero
    return steps.clamp(limits.min, limits.max).to(zero.dtype)


def dequantize(x: Tensor, scale: Value, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0) -> Tensor:
    """The numbers that integers stand for; scales for the tensor, or for each place of an axis."""
    if block_size:
        raise NotImplementedError("DequantizeLinear in blocks")
    steps = as_tensor(scale)
    sizes = [-1 if place == axis % x.ndim else 1 for place in range(x.ndim)] if steps.ndim else []
    found = x.to(steps.dtype)
    if zero is not None:
        found = found - zero.to(steps.dtype).reshape(sizes)
    return found * steps.reshape(sizes)


OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": unary(torch.abs),
    "Add": binary(operator.add),
    "And": binary(operator.and_),
    "ArgMax": pick_largest,
    "Cast": cast,
    "Ceil": unary(torch.ceil),
    "Clip": clip,
    "Concat": concat,
    "ConstantOfShape": fill,
    "Cos": unary(torch.cos),
    "CumSum": cumulate,
    "DequantizeLinear": dequantize,
    "Div": binary(divide),
    "Equal": binary(operator.eq),
    "Erf": unary(torch.erf),
    "Exp": unary(torch.exp),
    "Expand": expand,
    "Floor": unary(torch.floor),
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Gelu": lambda x, approximate="none": functional.gelu(x, approximate=approximate),
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.ndim)), keepdim=True),
    "Greater": binary(operator.gt),
    "GreaterOrEqual": binary(operator.ge),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).clamp(0, 1),
    "HardSwish": unary(functional.hardswish),
    "Identity": lambda x: x,
    "IsNaN": unary(torch.isnan),
    "LayerNormalization": layer_norm,
    "LeakyRelu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
    "Less": binary(operator.lt),
    "LessOrEqual": binary(operator.le),
    "Log": unary(torch.log),
    "Max": lambda *x: functools.reduce(torch.maximum, map(as_tensor, x)),
    "Min": lambda *x: functools.reduce(torch.minimum, map(as_tensor, x)),
    "Mul": binary(operator.mul),
    "Neg": unary(torch.neg),
    "Not": unary(torch.logical_not),
    "Or": binary(operator.or_),
    "Pad": pad,
    "Pow": binary(operator.pow),
    "QuantizeLinear": quantize,
    "Range": make_range,
    "Reciprocal": unary(torch.reciprocal),
    "ReduceL2": reduce(lambda x, axes, keepdim: torch.linalg.vector_norm(x, 2, axes, keepdim)),
    "ReduceMax": reduce(torch.amax),
    "ReduceMean": reduce(torch.mean),
    "ReduceMin": reduce(torch.amin),
    "ReduceSum": reduce(torch.sum),
    "Relu": unary(torch.relu),
    "Reshape": reshape,
    "Shape": shape,
    "Sigmoid": unary(torch.sigmoid),
    "Sign": unary(torch.sign),
    "Sin": unary(torch.sin),
    "Slice": slice_axes,
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "Split": split,
    "Sqrt": unary(torch.sqrt),
    "Squeeze": squeeze,
    "Sub": binary(operator.sub),
    "Tanh": unary(torch.tanh),
    "Tile": lambda x, repeats: x.repeat(as_list(repeats)),
    "Transpose": lambda x, perm=None: x.permute(perm if perm is not None else tuple(reversed(range(x.ndim)))),
    "Unsqueeze": unsqueeze,
    "Where": where,
}
"""By the operator's name. Products and convolutions are not among them: see torch_products.py."""
