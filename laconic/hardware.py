"""The machine as this process may use it: its processor, cores, instruction sets and memory."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from laconic.limits.cgroups import read_cpu_quota, read_memory_limit

FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "i8mm", "bf16",
)  # fmt: skip
"""The instruction set extensions that decide which kernels an engine can use."""


class Machine(BaseModel):
    """The properties of a machine that speed depends on. cores, memory (in bytes): those that this process may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: str
    cores: int
    features: tuple[str, ...]
    memory: int
    system: str

    @property
    def int8_saturates(self) -> bool:
        """Whether INT8 kernels may saturate: without VNNI they add pairs of products of 8 bits in 16 bits."""
        return "avx2" in self.features and not self.has_vnni and "amx_int8" not in self.features

    @property
    def has_vnni(self) -> bool:
        """Whether the processor adds products of 8 bits in 32 bits, by VNNI."""
        return bool({"avx512_vnni", "avx_vnni"} & set(self.features))


def cores() -> int:
    """Count the cores that this process may use: by affinity (taskset), and by the CPU quota of its container, rounded
    down. With more threads than the quota pays for, all of them stand still for the rest of each period."""
    affine, quota = count_affine_cores(), read_cpu_quota()
    return affine if quota is None else min(affine, quota.whole_cores)


def count_affine_cores() -> int:
    """Count the cores that this process may be scheduled on, whatever its quota."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less in a container; 0 if not known."""
    limit, physical = read_memory_limit(), physical_memory()
    return physical if limit is None or not physical else min(physical, int(limit.value))


def physical_memory() -> int:
    """Return the bytes of memory of the machine; 0 where the operating system does not report them."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def this_machine() -> Machine:
    """Describe the current machine; what the operating system does not report is left empty."""
    lines: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    flags = (lines.get("flags") or lines.get("Features") or "").split()
    return Machine(
        processor=lines.get("model name") or platform.processor() or platform.machine(),
        cores=cores(),
        features=tuple(feature for feature in FEATURES if feature in flags),
        memory=memory(),
        system=f"{platform.system()} {platform.machine()}",
    )


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Look for no reference cycles in the body, which makes many objects that are in none: Python would look at all of
    them again and again, which took half of the time of reading the index of a file."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def return_freed_memory() -> None:
    """Have the C library give freed blocks back to the system, where it is glibc. After an evaluation of MiniLM on 240
    texts it held 40 MB of them."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
