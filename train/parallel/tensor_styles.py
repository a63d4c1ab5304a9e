"""Styles of tensor parallelism: how the weights of one layer are spread over ranks, and how it computes with its part.

Weights are distributed tensors, so that optimizers, norms and snapshots know what each rank holds. Layers compute with
the local parts, since transformers' attention, norms and kernels take plain tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import linear
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.pytorch_utils import Conv1D

from train.parallel.sequence_shards import SequenceShards, change_hidden, refuse
from train.parallel.tensor_plan import FUSED, PER_HEAD

Forward = Callable[..., Any]


@dataclass(frozen=True)
class InputsRead:
    """What the layers of a module of `share_gradient_sums` have read, by id, and what they got for it. is_gathered:
    whether the module has gathered its positions, which are all that its layers may read."""

    is_gathered: bool
    tensors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


_read: ContextVar[InputsRead | None] = ContextVar("read", default=None)


class Style(Protocol):
    """What is done with a layer of a plan, in the form of transformers' own styles."""

    def shard_param(self, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        """Replace a parameter by a distributed tensor."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Let the module compute with this rank's part of its weights."""


class SplitOutputs:
    """Each rank computes its part of a linear layer's outputs: of each of `parts` that it computes one after the
    other."""

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    def shard_param(self, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        axis = 1 if isinstance(module, Conv1D) and name == "weight" else 0
        spread(module, name, mesh, Shard(axis) if self.parts == 1 else _StridedShard(axis, split_factor=self.parts))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        replace_computation(module, lambda inputs: project(module, read_inputs(inputs, mesh), to_part(module, "bias")))


class SplitInputs:
    """Each rank has a part of a linear layer's inputs, and the ranks sum up their outputs. shards: of which each rank
    then has its positions alone."""

    def __init__(self, shards: SequenceShards | None = None) -> None:
        self.shards = shards

    def shard_param(self, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        axis = 0 if isinstance(module, Conv1D) else 1
        spread(module, name, mesh, Replicate() if name == "bias" else Shard(axis))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        def compute(inputs: Tensor) -> Tensor:
            bias, partial = to_part(module, "bias"), project(module, inputs, None)
            if self.shards is not None:
                outputs = self.shards.sum_up(partial)
                return outputs if bias is None else outputs + sum_gradient(bias, mesh)
            summed = DTensor.from_local(partial, mesh, [Partial()], run_check=False)
            outputs = summed.redistribute(placements=[Replicate()]).to_local()
            return outputs if bias is None else outputs + bias

        replace_computation(module, compute)


class KeepWhole:
    """All ranks have all weights of a module. per_head: each applies them to its own heads or positions, so that what
    they learn is summed. members: the modules in it whose weights it uses, where these are not its own alone."""

    def __init__(self, members: Sequence[nn.Module] = (), *, per_head: bool = False) -> None:
        self.members, self.per_head = members, per_head

    def shard_param(self, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        spread(module, name, mesh, Replicate())

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        forward: Forward = module.forward

        @wraps(forward)
        def compute(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(self.members or (module,), mesh, per_head=self.per_head):
                return forward(*args, **kwargs)

        replace_computation(module, compute)


def find_style(style: str, module: nn.Module) -> Style:
    """Return what carries out a style of a plan for a module: ours for linear layers and for weights that stay whole,
    else transformers'."""
    is_linear = type(module) in (nn.Linear, Conv1D)
    if is_linear and style in LINEAR:
        return LINEAR[style]
    if style == PER_HEAD:
        # That of transformers sums gradients that are accumulated over micro-batches once more with each of them.
        return KeepWhole(per_head=True)
    found: Style = ALL_PARALLEL_STYLES[style]
    return found


LINEAR: dict[str, Style] = {"colwise": SplitOutputs(), "rowwise": SplitInputs(), FUSED: SplitOutputs(parts=3)}


def replace_computation(module: nn.Module, forward: Forward) -> None:
    """Replace the forward pass of one module instance."""
    module.forward = forward


def project(module: nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply inputs with this rank's part of a linear layer's weight."""
    weight = to_part(module, "weight")
    assert weight is not None
    return linear(inputs, weight.T if isinstance(module, Conv1D) else weight, bias)


def to_part(module: nn.Module, name: str) -> Tensor | None:
    """Return this rank's part of a parameter; None where the module has none of the name."""
    value = getattr(module, name)
    return value.to_local() if isinstance(value, DTensor) else value


def sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is the same on all ranks, whose gradients are summed over them."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def share_gradient_sums(module: nn.Module, gather: Callable[[Tensor], Tensor] | None = None) -> None:
    """Let the layers of a module that read the same tensor, as queries, keys and values do, sum its gradients over the
    ranks once: autograd adds them up before the ranks exchange them. gather: makes what they read of this rank's
    positions, and sums the gradients itself."""
    forward: Forward = module.forward

    @wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        token = _read.set(InputsRead(is_gathered=gather is not None))
        try:
            return forward(*args, **kwargs)
        finally:
            _read.reset(token)

    def read(part: Tensor) -> Tensor:
        assert gather is not None
        hidden, found = gather(part), _read.get()
        assert found is not None
        found.tensors[id(hidden)] = hidden, hidden
        return hidden

    if gather is not None:
        forward = change_hidden(forward, read)
    replace_computation(module, compute)


def read_inputs(inputs: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the inputs of a layer whose outputs are split, with gradients that are summed over the ranks."""
    read = _read.get()
    if read is None:
        return sum_gradient(inputs, mesh)
    if id(inputs) not in read.tensors:
        if read.is_gathered:
            raise refuse("its attention or FFN changes what it reads before it is cut")
        read.tensors[id(inputs)] = inputs, sum_gradient(inputs, mesh)
    return read.tensors[id(inputs)][1]


def spread(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter by a distributed tensor, of which this rank holds its part alone."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)


@contextmanager
def local_parameters(members: Sequence[nn.Module], mesh: DeviceMesh, *, per_head: bool) -> Iterator[None]:
    """Have this rank's parts in the place of the distributed parameters of some modules in the body. per_head: sum
    their gradients over the ranks."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    parts: dict[int, Tensor] = {}
    for member in members:
        parameters: dict[str, Any] = dict(member._parameters)
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                before.append((member._parameters, name, parameter))
                local = parameter.to_local()
                parts.setdefault(id(parameter), sum_gradient(local, mesh) if per_head else local)
    for parameters, name, parameter in before:
        parameters[name] = parts[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in before:
            parameters[name] = parameter
