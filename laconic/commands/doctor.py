"""Checks of the installation and the machine, each with a remedy for what does not work."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from laconic import __version__, registry
from laconic.cache import Cache
from laconic.errors import LaconicError
from laconic.hardware import Machine, count_affine_cores, physical_memory, this_machine
from laconic.limits.cgroups import read_cpu_quota, read_memory_limit
from laconic.runtimes.runtime import make_runtime
from laconic.units import format_bytes

DISTRIBUTIONS = {"PIL": "pillow"}
"""Packages whose distribution has another name than their module, by the module's name."""

CACHE_BYTES = 2e9
"""Bytes that a run takes in the cache for a model of a few hundred megabytes."""


class Finding(BaseModel):
    """The result of one check. remedy: what to try if it does not work; empty if there is nothing to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    works: bool
    found: str
    remedy: str = Field(default="", serialization_alias="try")


def examine() -> list[Finding]:
    """Check everything that Laconic depends on. Imports each engine; torch is located without being imported."""
    machine = this_machine()
    engines = dict.fromkeys(name for names in registry.TARGETS.values() for name in names)
    return [
        Finding(name="laconic", works=True, found=f"{__version__}, in {Path(__file__).parents[2]}"),
        Finding(name="python", works=True, found=f"{platform.python_version()}, {sys.executable}"),
        check_processor(machine),
        Finding(name="cores", works=True, found=format_cores(machine)),
        Finding(name="memory", works=True, found=format_memory(machine)),
        *(check_engine(name) for name in engines),
        *find_conflicts(),
        *(check_extra(extra) for extra in ("compress", "serve")),
        check_cache(Cache().folder),
    ]


def check_processor(machine: Machine) -> Finding:
    """Report which arithmetic is fast on this processor."""
    features = set(machine.features)
    if features & {"amx_int8", "avx512_vnni", "avx_vnni", "i8mm"}:
        integer = "INT8 is fast"
    elif features & {"avx2", "asimd"}:
        integer = "INT8 runs without dedicated instructions: expect at most twice the speed of FP32"
    else:
        integer = "INT8 may be slower than FP32: quantize weights only (quantize.weights)"
    brain = "BF16 is fast" if features & {"amx_bf16", "avx512_bf16", "bf16"} else "BF16 is not used"
    description = (
        f"{machine.processor} ({', '.join(machine.features) or 'no vector instructions known'}): {integer}; {brain}"
    )
    saturates = "; INT8 sums may saturate, so weights may get a reduced range" if machine.int8_saturates else ""
    return Finding(name="processor", works=True, found=description + saturates)


def format_cores(machine: Machine) -> str:
    """Format the number of cores that this process may use, and of all cores with the reason if there are more."""
    whole, quota = os.cpu_count() or machine.cores, read_cpu_quota()
    if quota is not None and quota.value < count_affine_cores():
        reason = f"the CPU quota in {quota.file} is {quota.value:g}"
    elif whole > machine.cores:
        reason = "the CPU affinity leaves no more"
    else:
        return str(whole)
    return f"{machine.cores} of {whole} available to this process: {reason}"


def format_memory(machine: Machine) -> str:
    """Format the memory that this process may use, and all of it with the reason if there is more."""
    limit, physical = read_memory_limit(), physical_memory()
    if limit is None or limit.value >= physical:
        return format_bytes(machine.memory)
    whole, usable = format_bytes(physical), format_bytes(machine.memory)
    return f"{usable} of {whole} available to this process: the limit is in {limit.file}"


def check_engine(name: str) -> Finding:
    """Check that an engine imports, and report its version and the arithmetics that it supports."""
    package = name  # an engine that fails to import cannot give the name of its package
    try:
        runtime = make_runtime(name)
        package = runtime.package
        return Finding(name=name, works=True, found=f"{runtime.version()}, {' and '.join(runtime.computes())}")
    except LaconicError as error:
        message, _, remedy = str(error).partition(". Try: ")
        return Finding(name=name, works=False, found=message, remedy=remedy)
    except Exception as error:  # noqa: BLE001 - a broken installation may raise any exception
        command = f"pip install --force-reinstall {package}"
        return Finding(name=name, works=False, found=f"{type(error).__name__}: {error}", remedy=command)


def find_conflicts() -> Iterator[Finding]:
    """Find wheels that provide the same module, where the one installed last has overwritten the other."""
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if find_version(name)]
    if len(both) == 2:
        yield Finding(
            name="onnxruntime",
            works=False,
            found="both onnxruntime and onnxruntime-gpu are installed; they overwrite each other",
            remedy="pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'laconic[cpu]'",
        )


def check_extra(extra: str) -> Finding:
    """Check that all packages of an extra are installed."""
    names = [name for name, each in registry.EXTRAS.items() if each == extra]
    absent = [name for name in names if util.find_spec(name) is None]
    if absent:
        return Finding(
            name=extra,
            works=False,
            found=f"not installed: {', '.join(absent)}",
            remedy=f"pip install 'laconic[{extra}]'",
        )
    return Finding(name=extra, works=True, found=", ".join(f"{name} {find_version(name)}" for name in names))


def find_version(package: str) -> str | None:
    """Find the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def check_cache(folder: Path) -> Finding:
    """Check that the cache folder is writable, and has enough free space."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        remedy = "set LACONIC_CACHE to a writable folder"
        return Finding(name="cache", works=False, found=f"{folder}: {error.strerror}", remedy=remedy)
    description = f"{folder}, {free / 1e9:.1f} GB free"
    remedy = "set LACONIC_CACHE to a folder on a larger disk" if free < CACHE_BYTES else ""
    return Finding(name="cache", works=free >= CACHE_BYTES, found=description, remedy=remedy)
