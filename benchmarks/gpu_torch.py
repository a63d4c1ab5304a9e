"""PyTorch as two ways of the GPU benchmark: eager, and torch.compile; FP8 and INT8 with torchao's kernels."""

import warnings
from typing import Any

import numpy as np
import torch
from gpu_device import BenchmarkDevice
from gpu_models import Network
from gpu_rows import HostInputs, NotMeasured, first_line
from torch import Tensor, nn

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP8": torch.bfloat16}
"""The type of what is not quantized; BF16 for all others."""
QUANTIZED = {"FP8": "Float8DynamicActivationFloat8WeightConfig", "INT8": "Int8DynamicActivationInt8WeightConfig"}
FP8_CAPABILITY = (8, 9)


class TorchRunner:
    """A module on the device, with inputs copied from pinned host memory."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: BenchmarkDevice, *, compiled: bool) -> None:
        self.dtype, self.device = dtype, device
        self.module: Any = module
        self.pinned: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        if compiled:
            self.module = compile_module(module, device)

    def run(self, inputs: HostInputs) -> np.ndarray[Any, Any]:
        """The output as float32."""
        with torch.inference_mode():
            tensors = {name: self.copy(name, array) for name, array in inputs.items()}
            answer: np.ndarray[Any, Any] = self.module(**tensors).float().cpu().numpy()
        return answer

    def copy(self, name: str, array: np.ndarray[Any, Any]) -> Tensor:
        """An input on the device; floats in the module's type."""
        tensor = torch.from_numpy(array)
        if self.device.on_gpu:
            key = name, array.shape
            if key not in self.pinned:
                self.pinned[key] = torch.empty_like(tensor, pin_memory=True)
            tensor = self.pinned[key].copy_(tensor).to(self.device.torch, non_blocking=True)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def close(self) -> None:
        """Release the module, and what torch.compile made, which it would keep."""
        self.module = None
        torch.compiler.reset()
        self.pinned.clear()


def open_torch(network: Network, precision: str, device: BenchmarkDevice, *, compiled: bool) -> TorchRunner:
    """The model in a precision. Raises NotMeasured where the device or torchao cannot."""
    dtype = DTYPES.get(precision, torch.bfloat16)
    module = network.build()
    if precision in QUANTIZED:
        check_quantizable(module, precision, device)
    module = module.to(device.torch, dtype)
    if precision in QUANTIZED:
        quantize(module, QUANTIZED[precision])
    return TorchRunner(module, dtype, device, compiled=compiled)


def check_quantizable(module: nn.Module, precision: str, device: BenchmarkDevice) -> None:
    """Raise NotMeasured unless most of the module could run in the precision on this device, with torchao."""
    if precision == "FP8" and device.capability() < FP8_CAPABILITY:
        here = ".".join(map(str, device.capability())) if device.on_gpu else "none, being a CPU"
        raise NotMeasured(f"FP8 needs compute capability 8.9, the device has {here}")
    weights = {
        kind: sum(part.weight.numel() for part in module.modules() if isinstance(part, kind))
        for kind in (nn.Linear, nn.Conv2d)
    }
    share = weights[nn.Linear] / sum(weights.values())
    if share < 0.5:
        raise NotMeasured(f"torchao quantizes linear layers, which hold {share:.0%} of the weights here")


def quantize(module: nn.Module, config: str) -> None:
    """Quantize the linear layers of a module on its device, in place. config: the name of torchao's settings."""
    try:
        from torchao import quantization  # type: ignore[import-untyped]  # torchao has no types
    except Exception as error:
        raise NotMeasured(f"torchao cannot be imported: {first_line(error)}") from error
    if not hasattr(quantization, config):
        raise NotMeasured(f"this version of torchao has no {config}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(module, getattr(quantization, config)())


def compile_module(module: nn.Module, device: BenchmarkDevice) -> Any:
    """The module compiled for each shape, with CUDA graphs; in a dry run traced only, and run eagerly.

    Where tracing would give up and go on uncompiled, it raises instead: a time of eager execution would be shown as one
    of compiled code.
    """
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device.on_gpu:
        return torch.compile(module, mode="reduce-overhead", dynamic=False, fullgraph=True)
    return torch.compile(module, backend="eager", dynamic=False, fullgraph=True)


def forbid_tf32() -> None:
    """Make FP32 mean FP32, in products and convolutions."""
    torch.set_float32_matmul_precision("highest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 and later prefer other names, which 2.8 does not have
        torch.backends.cudnn.allow_tf32 = False
