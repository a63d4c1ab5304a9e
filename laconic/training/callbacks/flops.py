"""How much of a device's arithmetic a training run uses: model FLOPs utilisation (PaLM, arXiv:2204.02311, app. B)."""

import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import hash_of

TERA = 1e12
DATASHEETS: tuple[tuple[str, tuple[float | None, float | None, float | None, float]], ...] = (
    (r"H100 PCIe", (756, 756, 378, 51)),
    (r"H[12]00 NVL", (835.5, 835.5, 417.5, 60)),
    (r"H100 80GB HBM3|H200", (989.4, 989.4, 494.7, 66.9)),
    (r"A100", (312, 312, 156, 19.5)),
    (r"A10", (125, 125, 62.5, 31.2)),
    (r"A30", (165, 165, 82, 10.3)),
    (r"L40S", (362.05, 362.05, 183, 91.6)),
    (r"L40", (181.05, 181.05, 90.5, 90.5)),
    (r"L4", (121, 121, 60, 30.3)),
    (r"V100-SXM2", (None, 125, None, 15.7)),
    (r"T4", (None, 65, None, 8.1)),
)
"""TFLOP/s from NVIDIA's data sheets: BF16, FP16, TF32, FP32; dense, that is half of what is printed for sparse."""


@dataclass(frozen=True)
class Peak:
    """The FLOP/s that a device can reach in a precision, and where the figure comes from."""

    flops: float
    precision: str
    source: str

    def __str__(self) -> str:
        return f"of {self.flops / TERA:.4g} TFLOP/s in {self.precision} ({self.source})"


def device_peak(device: torch.device, dtype: torch.dtype, cache: Cache) -> Peak:
    """The data sheet's figure where there is one, else the best that a large product of matrices reaches here.

    The measurement is made once per machine and kept in the cache. On a machine that is busy it may come out too low,
    and the utilisation too high.
    """
    precision = precision_of(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().processor
    stated = datasheet(name, precision) if device.type == "cuda" else None
    if stated:
        return Peak(stated, precision, f"data sheet of the {name}")
    machine = this_machine().model_dump(mode="json")
    key = hash_of("peak", machine, device.type, name, precision, torch.get_num_threads(), torch.__version__)
    flops = cache.json(key, lambda: measure(device, dtype))
    return Peak(float(flops), precision, f"measured here on {name}")


def precision_of(device: torch.device, dtype: torch.dtype) -> str:
    """What matrices of this dtype are multiplied in."""
    if dtype == torch.float32:
        lower = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "TF32" if lower else "FP32"
    return {torch.bfloat16: "BF16", torch.float16: "FP16"}.get(dtype, str(dtype).removeprefix("torch."))


def datasheet(name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device by the name that CUDA gives it; None for a device, a slice of one, or a precision that
    is not in the table."""
    if "MIG" in name:
        return None
    for pattern, figures in DATASHEETS:
        if re.search(rf"\b({pattern})\b", name):
            stated = dict(zip(("BF16", "FP16", "TF32", "FP32"), figures, strict=True)).get(precision)
            return stated * TERA if stated else None
    return None


def measure(device: torch.device, dtype: torch.dtype, *, rounds: int = 20) -> float:
    """FLOP/s of the best of a few products of large square matrices."""
    size, repeat = (4096, 20) if device.type == "cuda" else (1024, 1)
    clock = time.perf_counter if device.type == "cuda" else processor_time
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    best = float("inf")
    for _ in range(rounds + 1):
        wait(device)
        start = clock()
        for _ in range(repeat):
            torch.mm(a, b)
        wait(device)
        best = min(best, clock() - start)
    return 2 * size**3 * repeat / best


def processor_time() -> float:
    """Seconds that each thread of the process has had a core: others that want it too do not count."""
    return time.process_time() / torch.get_num_threads()


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of attention from the shapes [batch, heads, length, width] of its inputs; a causal mask saves none, as
    torch counts the other kernels."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[-2] * (width + value[-1]))


def product(rows: Any, packed: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a product with 4-bit weights of this shape, [out, in], from the shape of its input, [..., in]."""
    return int(2 * math.prod(rows) * shape[0])


def uncounted() -> dict[Any, Any]:
    """Formulas for kernels that torch 2.13 counts as nothing: of attention on a CPU, and of bitsandbytes, if loaded."""
    formulas: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        formulas[torch.ops.bitsandbytes.gemm_4bit] = product
    return formulas


class Flops:
    """The FLOPs that the model itself needs, from the forward passes of the first step.

    `span` goes round the phases of a step. A backward pass costs as much again for the gradients of the activations,
    and for those of the parameters that learn. What is computed a second time (gradient checkpointing) is not counted:
    that is what tells MFU from the utilisation of the hardware. Products of matrices, convolutions and attention are
    counted; recurrent layers on a CPU are not, by torch. Later steps are taken to cost the same per token or row.
    A compiled model runs uncompiled for the one step that is counted.
    """

    def __init__(self, peak: Peak, *, learning: float = 1.0) -> None:
        """learning: share of the parameters that learn, 0 to 1: near 0 for LoRA."""
        self.peak = peak
        self._factor = 2 + learning
        self._forward = 0
        self._counting = True
        self._each: float | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the forward passes until the first step of the optimizer."""
        if name == "optimizer":
            self._counting = False
        if name != "forward" or not self._counting:
            yield
            return
        # What torch.compile first meets under the counter, it would never compile: it waits for the next step.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Using `torch.compile"
            )  # about hooks by module; only the sum is used
            with FlopCounterMode(display=False, custom_mapping=uncounted()) as counter:
                yield
        self._forward += counter.get_total_flops()

    def utilisation(self, units: int, seconds: float) -> float | None:
        """MFU of a step of so many tokens or rows, 0 to 1; None where nothing was counted. Called for the first step
        first."""
        if not self._forward or not units:
            return None
        if self._each is None:
            self._each = self._factor * self._forward / units
        return self._each * units / seconds / self.peak.flops
