"""Model FLOPs utilization (MFU) of a training run (PaLM, arXiv:2204.02311, appendix B)."""

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import hash_of, library_digest
from laconic.models.flop_formulas import uncounted_kernels

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
"""Dense TFLOP/s from NVIDIA's data sheets in BF16, FP16, TF32, FP32: half of the figures for sparse ones."""


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of a device in a precision, and the source of the figure."""

    flops: float
    precision: str
    source: str

    def __str__(self) -> str:
        return f"of {self.flops / TERA:.4g} TFLOP/s in {self.precision} ({self.source})"


def device_peak(device: torch.device, dtype: torch.dtype, cache: Cache) -> Peak:
    """Return the peak from the data sheet where there is one, else the best that a large matrix product reaches here.

    It is measured once per machine and cached. On a busy machine it may be too low, and the utilization too high.
    """
    precision = precision_of(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().processor
    stated = datasheet(name, precision) if device.type == "cuda" else None
    if stated:
        return Peak(stated, precision, f"data sheet of the {name}")
    machine = this_machine().model_dump(mode="json")
    key = hash_of("peak", 1, machine, device.type, name, precision, torch.get_num_threads(), library_digest())
    flops = cache.json(key, lambda: measure_peak(device, dtype))
    return Peak(float(flops), precision, f"measured here on {name}")


def precision_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return the precision in which matrices of this dtype are multiplied."""
    if dtype == torch.float32:
        lower = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "TF32" if lower else "FP32"
    return {torch.bfloat16: "BF16", torch.float16: "FP16"}.get(dtype, str(dtype).removeprefix("torch."))


def datasheet(name: str, precision: str) -> float | None:
    """Look up the dense FLOP/s of a device by its CUDA name; None for MIG slices, and for what is not in the table."""
    if "MIG" in name:
        return None
    for pattern, figures in DATASHEETS:
        if re.search(rf"\b({pattern})\b", name):
            stated = dict(zip(("BF16", "FP16", "TF32", "FP32"), figures, strict=True)).get(precision)
            return stated * TERA if stated else None
    return None


PATIENCE = 2.0
"""Seconds after which no further product is timed. In BF16 on a core with AVX2 alone one takes 0.2 s."""


def measure_peak(device: torch.device, dtype: torch.dtype, *, rounds: int = 20) -> float:
    """Measure the FLOP/s of the fastest of several large matrix products, in the layout of a linear layer. Others may
    have slower kernels: with the second matrix not transposed, BF16 on a core with AVX2 takes 2.4 s, and not 0.2."""
    size, repeat = (4096, 20) if device.type == "cuda" else (1024, 1)
    clock = time.perf_counter if device.type == "cuda" else processor_time
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    times: list[float] = []
    while len(times) <= rounds and sum(times) < PATIENCE:
        synchronize(device)
        start = clock()
        for _ in range(repeat):
            nn.functional.linear(a, b)
        synchronize(device)
        times.append(clock() - start)
    return 2 * size**3 * repeat / min(times)


def processor_time() -> float:
    """Return the processor seconds per thread of this process; other processes on the same cores do not count."""
    return time.process_time() / torch.get_num_threads()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Flops:
    """The FLOPs of a model, counted in the forward passes of the first step.

    `phase` is a context for the phases of a step. A backward pass is taken to cost as much again for the gradients of
    activations, and for those of trainable parameters. Recomputation (gradient checkpointing) is not counted, which
    distinguishes MFU from hardware utilization. Matrix products, convolutions and attention are counted; recurrent
    layers on a CPU are not, by torch. Later steps are assumed to cost the same per token or row. A compiled model runs
    uncompiled in the step that is counted.
    """

    def __init__(self, peak: Peak, *, trainable: float = 1.0) -> None:
        """trainable: share of trainable parameters, 0 to 1: near 0 for LoRA."""
        self.peak = peak
        self._factor = 2 + trainable
        self._forward = 0
        self._counting = True
        self._each: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the FLOPs of forward passes until the first step of the optimizer."""
        if name == "optimizer":
            self._counting = False
        if name != "forward" or not self._counting:
            yield
            return
        # torch.compile would never compile what it first sees under the counter, so it waits for the next step.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Using `torch.compile"
            )  # about hooks by module; only the sum is used
            with FlopCounterMode(display=False, custom_mapping=uncounted_kernels()) as counter:
                yield
        self._forward += counter.get_total_flops()

    def utilization(self, units: int, seconds: float) -> float | None:
        """Return the MFU of a step of `units` tokens or rows, 0 to 1; None without a count. Called for step 1 first."""
        if not self._forward or not units:
            return None
        if self._each is None:
            self._each = self._factor * self._forward / units
        return self._each * units / seconds / self.peak.flops
