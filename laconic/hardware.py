"""The machine: its processor, cores, instruction sets and memory."""

import ctypes
import os
import platform
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "bf16",
)
"""The instruction set extensions that decide which kernels an engine can use."""


class Machine(BaseModel):
    """The properties of a machine that speed depends on. memory in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: str
    cores: int
    features: tuple[str, ...]
    memory: int
    system: str

    @property
    def int8_saturates(self) -> bool:
        """Whether INT8 kernels may saturate: without VNNI they add pairs of products of 8 bits in 16 bits."""
        return "avx2" in self.features and not {"avx512_vnni", "avx_vnni", "amx_int8"} & set(self.features)


def cores() -> int:
    """The number of cores that this process may use: fewer than the machine has under taskset or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def this_machine() -> Machine:
    """Describe the current machine; what the operating system does not report is left empty."""
    lines: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    flags = (lines.get("flags") or lines.get("Features") or "").split()
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Machine(
        processor=lines.get("model name") or platform.processor() or platform.machine(),
        cores=cores(),
        features=tuple(feature for feature in FEATURES if feature in flags),
        memory=pages * (os.sysconf("SC_PAGE_SIZE") if pages else 0),
        system=f"{platform.system()} {platform.machine()}",
    )


def return_freed_memory() -> None:
    """Have the C library give freed blocks back to the system, where it is glibc. After an evaluation of MiniLM on 240
    texts it held 40 MB of them."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
