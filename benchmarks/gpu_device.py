"""The device of the GPU benchmark: its name, memory in use, energy and peak FLOP/s. Needs PyTorch alone."""

import re
from typing import Any

import torch

try:
    import pynvml
except ImportError:
    pynvml = None

PRECISIONS = ("FP32", "FP16", "BF16", "FP8", "INT8")
DENSE_PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    (r"H100 PCIe", (51, 756, 756, 1513, 1513)),
    (r"H[12]00 NVL", (60, 835.5, 835.5, 1671, 1671)),
    (r"H100 80GB HBM3|H200", (66.9, 989.4, 989.4, 1978.9, 1978.9)),
    (r"A100", (19.5, 312, 312, None, 624)),
    (r"A10", (31.2, 125, 125, None, 250)),
    (r"A30", (10.3, 165, 165, None, 330)),
    (r"L40S", (91.6, 362.05, 362.05, 733, 733)),
    (r"L40", (90.5, 181.05, 181.05, 362, 362)),
    (r"L4", (30.3, 121, 121, 242.5, 242.5)),
    (r"V100-SXM2", (15.7, 125, None, None, None)),
    (r"T4", (8.1, 65, None, None, 130)),
    (r"RTX 4090", (82.6, 165.2, 165.2, 330.3, 660.6)),
    (r"RTX 3090", (35.6, 71, 71, None, 284)),
)
"""Dense TFLOP/s (for INT8 TOP/s) from NVIDIA's data sheets, by PRECISIONS: half of the figures for sparse ones, sums in
FP32, and FP32 without TF32."""


def find_peak(name: str, precision: str) -> float | None:
    """Peak dense FLOP/s of a GPU by its CUDA name; None for what is not in the table, and for MIG slices."""
    if "MIG" in name:
        return None
    for pattern, figures in DENSE_PEAKS:
        if re.search(rf"\b({pattern})\b", name):
            figure = dict(zip(PRECISIONS, figures, strict=True)).get(precision)
            return None if figure is None else figure * 1e12
    return None


class BenchmarkDevice:
    """The first GPU, or the CPU for a dry run.

    absent: the reason for each column that cannot be measured here.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.on_gpu = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.on_gpu else "CPU"
        self.absent: dict[str, str] = {}
        self._nvml: Any = None
        if not self.on_gpu:
            self.absent |= dict.fromkeys(("memory", "energy", "share of the peak"), "this is a dry run on the CPU")
            return
        if find_peak(self.name, "FP16") is None:
            self.absent["share of the peak"] = f"no data sheet of {self.name!r} is known"
        self._open_nvml()
        self._warm_up()

    def capability(self) -> tuple[int, int]:
        """The compute capability; (0, 0) for the CPU."""
        return torch.cuda.get_device_capability(self.torch) if self.on_gpu else (0, 0)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.torch)

    def release(self) -> None:
        """Give unused memory of PyTorch's allocator back to the device."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def bytes_in_use(self) -> int | None:
        """Bytes of device memory in use, by all engines and programs; None for the CPU."""
        if not self.on_gpu:
            return None
        free, total = torch.cuda.mem_get_info(self.torch)
        return total - free

    def joules(self) -> float | None:
        """Energy that the device has used since its driver was loaded, in joules; None where it is not counted."""
        if self._nvml is None:
            return None
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._nvml)) / 1e3

    def _open_nvml(self) -> None:
        if pynvml is None:
            self.absent["energy"] = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(self.torch).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._nvml = handle
        except (pynvml.NVMLError, AttributeError) as error:
            self.absent["energy"] = f"the device does not tell its energy: {error}"

    def _warm_up(self) -> None:
        """Load the libraries of products and convolutions, whose memory belongs to no model."""
        for dtype in (torch.float32, torch.float16):
            image = torch.ones(1, 8, 16, 16, device=self.torch, dtype=dtype)
            torch.nn.functional.conv2d(image, image[:, :, :3, :3])
            torch.mm(image[0, 0], image[0, 0])
        self.synchronize()
