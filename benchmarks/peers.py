"""What other tools make of a model, each as its guide says, with the same samples to calibrate with."""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch._inductor.config
import torch_pruning
from inductor_int8 import quantize_for_inductor
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

from laconic.arrays import Arrays
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call
from laconic.models.torch_session import TorchSession
from laconic.runtimes.runtime import Session, make_runtime
from laconic.tasks.task import Task

FFN, HEADS = 0.5, 0.67
"""The shares of feed-forward units and of heads that Torch-Pruning leaves: those of the recipe `text-embedding`."""
TIMED = {(1, 128), (8, 128), (32, 128), (1, 3, 224, 224), (8, 3, 224, 224)}
"""Shapes of the batches that are timed: rows and tokens, or images."""

Way = tuple[str, Session, int]
"""A name, what answers, and its size in bytes."""


def peers(
    graph: Path, original: Checkpoint, few: Dataset, folder: Path, stack: ExitStack, *, attention: bool = True
) -> Iterator[Way]:
    """What other tools make of the float graph or of the module, in one thread each. few: what they calibrate with.
    attention: whether the model is a transformer."""
    openvino = make_runtime("openvino")
    yield "ONNX Runtime, FP32", opened(graph, stack), graph.stat().st_size
    for compute in openvino.computes():
        session = stack.enter_context(openvino.open(graph, threads=1, compute=compute))
        yield f"OpenVINO, {compute}", session, graph.stat().st_size
    yield from in_onnxruntime(graph, few, original.task, folder, stack, attention=attention)
    if importlib.util.find_spec("nncf"):
        path = folder / "nncf.onnx"
        nncf_int8(graph, few, original.task, path, attention=attention)
        for compute in openvino.computes():
            session = stack.enter_context(openvino.open(path, threads=1, compute=compute))
            yield f"NNCF, INT8 (OpenVINO, {compute})", session, path.stat().st_size
        yield "NNCF, INT8 (ONNX Runtime)", opened(path, stack), path.stat().st_size
    modules: dict[str, nn.Module] = {"torch.compile, FP32": Compiled(original.module)}
    if "bfloat16" in openvino.computes():  # without its instructions ResNet-50's shape was 9 times slower than in FP32
        half = copy.deepcopy(original.module).bfloat16()
        modules |= {"torch eager, BF16": InBfloat16(half), "torch.compile, BF16": InBfloat16(Compiled(half))}
    modules["torch.compile, INT8 (torchao's PT2E)"] = Compiled(quantize_for_inductor(original, few))
    yield from (in_torch(name, module, original, stack) for name, module in modules.items())


def in_onnxruntime(
    graph: Path, few: Dataset, task: Task, folder: Path, stack: ExitStack, *, attention: bool
) -> Iterator[Way]:
    """ONNX Runtime's own INT8, per channel, as its guide says: behind its preprocessing, embeddings included."""
    prepared = folder / "prepared.onnx"
    quant_pre_process(graph, prepared, skip_symbolic_shape=True)
    kinds = {"op_types_to_quantize": ["MatMul", "Gather"]} if attention else {}
    if attention:  # its integer convolution has no fast kernel
        path = folder / "dynamic.onnx"
        quantize_dynamic(prepared, path, per_channel=True, weight_type=QuantType.QInt8)
        yield "ONNX Runtime, dynamic INT8", opened(path, stack), path.stat().st_size
    path = folder / "static.onnx"
    quantize_static(
        prepared, path, Reader(few, task), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **kinds,
    )  # fmt: skip
    yield "ONNX Runtime, static INT8", opened(path, stack), path.stat().st_size


def in_torch(name: str, module: nn.Module, original: Checkpoint, stack: ExitStack) -> Way:
    """A module with the original's inputs and outputs."""
    size = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    return name, stack.enter_context(TorchSession(module, original.inputs, original.outputs, 1)), size


class InBfloat16(nn.Module):
    """A module that computes in BF16, with inputs and outputs in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The outputs by name, float32."""
        found = self.module(*(each.bfloat16() if each.is_floating_point() else each for each in inputs))
        return {name: each.float() for name, each in (found if isinstance(found, dict) else {"output": found}).items()}


class Compiled(nn.Module):
    """A module compiled for each shape that is timed, and once for all others.

    With the weights frozen, which is the compiler's best setting for inference on a processor. One compilation for
    every shape is up to 7 % slower on the timed shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        torch._inductor.config.freezing = True
        self.module = module
        # In a tuple, so that the parameters are not counted three times.
        self.compiled = (torch.compile(module, dynamic=False), torch.compile(copy.deepcopy(module), dynamic=True))

    def forward(self, *inputs: Tensor) -> Any:
        """The outputs of the module."""
        fixed, free = self.compiled
        return (fixed if tuple(inputs[0].shape) in TIMED else free)(*inputs)


def optimum(path: Path, like: Path, folder: Path, stack: ExitStack) -> Way:
    """A file that `optimum-cli onnxruntime quantize` wrote."""
    path = named(path, like, folder / "front-optimum.onnx")
    return "Optimum, INT8 dynamic", opened(path, stack), path.stat().st_size


def named(path: Path, like: Path, to: Path) -> Path:
    """The file with one output, that which has the number of dimensions and gets the name of the other file's."""
    model, (wanted,) = onnx.load(path), onnx.load(like, load_external_data=False).graph.output
    rank = len(wanted.type.tensor_type.shape.dim)
    (given,) = [each for each in model.graph.output if len(each.type.tensor_type.shape.dim) == rank]
    model.graph.node.add(op_type="Identity", input=[given.name], output=[wanted.name])
    given.name = wanted.name
    del model.graph.output[:]
    model.graph.output.append(given)
    onnx.save(model, to)
    return to


def opened(path: Path, stack: ExitStack) -> Session:
    """A file in ONNX Runtime, one thread."""
    return stack.enter_context(make_runtime("onnxruntime").open(path, threads=1))


def nncf_int8(graph: Path, few: Dataset, task: Task, path: Path, *, attention: bool) -> None:
    """NNCF's INT8, with its defaults, for a transformer if it is one."""
    import nncf

    batch = [inputs for _, inputs in batches(few, task, 1)]
    kind = {"model_type": nncf.ModelType.TRANSFORMER} if attention else {}
    onnx.save(nncf.quantize(onnx.load(graph), nncf.Dataset(batch), subset_size=len(batch), **kind), path)


def pruned(module: nn.Module, task: Task) -> nn.Module:
    """Fewer feed-forward units and heads by Torch-Pruning, after its example for BERT, the width of the vectors kept.

    The example writes the new number of heads into each attention; it has to, since nothing else does.
    """
    module = copy.deepcopy(module).requires_grad_(True)
    attentions = [each for path, each in module.named_modules() if path.endswith("attention.self")]
    heads = {part: each.num_attention_heads for each in attentions for part in (each.query, each.key, each.value)}
    inner = [each for path, each in module.named_modules() if path.endswith("intermediate.dense")]
    outer = [each for each in module.modules() if isinstance(each, nn.Linear) and each not in (*heads, *inner)]
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    pruner = torch_pruning.pruner.BasePruner(
        module,
        {name: torch.tensor(array) for name, array in task.typical(1, 16).items()},
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        forward_fn=call,
        pruning_ratio=1 - FFN,
        num_heads=dict(heads),
        prune_num_heads=True,
        prune_head_dims=False,
        head_pruning_ratio=1 - HEADS,
        ignored_layers=[*outer, *tables],
    )
    pruner.step()
    for each in attentions:
        each.num_attention_heads = pruner.num_heads[each.query]
        each.attention_head_size = each.query.out_features // each.num_attention_heads
        each.all_head_size = each.query.out_features
    return module.eval()


class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
    """Samples for ONNX Runtime's calibration, one a batch."""

    def __init__(self, few: Dataset, task: Task) -> None:
        self.batches = (inputs for _, inputs in batches(few, task, 1))

    def get_next(self) -> Arrays | None:
        """The next sample's inputs; None behind the last."""
        found = next(self.batches, None)
        return None if found is None else {name: np.asarray(array) for name, array in found.items()}
