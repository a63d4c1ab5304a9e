"""What works here, and for each thing that does not, why and what to try."""

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
from laconic.hardware import Machine, this_machine
from laconic.runtimes.runtime import make_runtime

DISTRIBUTIONS = {"PIL": "pillow"}
"""Packages that are installed under another name than they are imported by."""

ROOM = 2e9
"""Bytes that a run over a model of a few hundred megabytes takes in the cache."""


class Finding(BaseModel):
    """One thing that was looked at. remedy: what to try where it does not work; empty where there is nothing to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    works: bool
    found: str
    remedy: str = Field(default="", serialization_alias="try")


def examine() -> list[Finding]:
    """Everything that Laconic depends upon. Opens each engine; torch is looked for, and not imported."""
    machine = this_machine()
    return [
        Finding(name="laconic", works=True, found=f"{__version__}, in {Path(__file__).parents[2]}"),
        Finding(name="python", works=True, found=f"{platform.python_version()}, {sys.executable}"),
        check_processor(machine),
        Finding(name="cores", works=True, found=format_cores(machine)),
        Finding(name="memory", works=True, found=f"{machine.memory / 1e9:.1f} GB"),
        *(check_engine(name) for name in registry.RUNTIMES if name not in ("torch", "fake")),
        *find_conflicts(),
        *(check_extra(extra) for extra in ("compress", "serve")),
        *(check_target(name) for name, engines in registry.TARGETS.items() if not engines),
        check_cache(Cache().folder),
    ]


def check_processor(machine: Machine) -> Finding:
    """Which arithmetic is fast here."""
    features = set(machine.features)
    if features & {"amx_int8", "avx512_vnni", "avx_vnni", "i8mm"}:
        integer = "INT8 is fast"
    elif features & {"avx2", "asimd"}:
        integer = "INT8 runs, without instructions of its own: expect at most twice the speed of FP32"
    else:
        integer = "INT8 may be slower than FP32: keep weights in INT8 only (quantize.weights)"
    brain = "BF16 is fast" if features & {"amx_bf16", "avx512_bf16", "bf16"} else "BF16 is not used"
    found = f"{machine.processor} ({', '.join(machine.features) or 'no vector instructions known'}): {integer}; {brain}"
    # Without VNNI a kernel adds pairs of 8-bit products in 16 bits, which overflow.
    saturates = "avx2" in features and not features & {"avx512_vnni", "avx_vnni", "amx_int8"}
    return Finding(name="processor", works=True, found=found + ("; INT8 sums may saturate" if saturates else ""))


def format_cores(machine: Machine) -> str:
    """Of how many this process may use how many."""
    whole = os.cpu_count() or machine.cores
    return str(whole) if whole == machine.cores else f"{machine.cores} of {whole}, by the limits of this process"


def check_engine(name: str) -> Finding:
    """Whether an engine imports, and what it computes in."""
    try:
        runtime = make_runtime(name)
        return Finding(name=name, works=True, found=f"{runtime.version()}, {' and '.join(runtime.computes())}")
    except LaconicError as error:
        said, _, remedy = str(error).partition(" Try: ")
        return Finding(name=name, works=False, found=said, remedy=remedy)
    except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
        command = f"pip install --force-reinstall {name}"
        return Finding(name=name, works=False, found=f"{type(error).__name__}: {error}", remedy=command)


def find_conflicts() -> Iterator[Finding]:
    """Two wheels that own the same module: the one that was installed last has overwritten the other."""
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if find_version(name)]
    if len(both) == 2:
        yield Finding(
            name="onnxruntime",
            works=False,
            found="both onnxruntime and onnxruntime-gpu are installed, and overwrite each other",
            remedy="pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'laconic[cpu]'",
        )


def check_extra(extra: str) -> Finding:
    """What an extra brings, and what of it is absent."""
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
    """Of an installed package; None where it is not installed."""
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def check_target(name: str) -> Finding:
    """A target that is known by name only."""
    built = " or ".join(each for each, engines in registry.TARGETS.items() if engines)
    return Finding(name=f"target {name}", works=False, found="not built in this version", remedy=f"--target {built}")


def check_cache(folder: Path) -> Finding:
    """Whether results can be kept, and how much room there is."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        remedy = "set LACONIC_CACHE to a folder that you may write to"
        return Finding(name="cache", works=False, found=f"{folder}: {error.strerror}", remedy=remedy)
    found = f"{folder}, {free / 1e9:.1f} GB free"
    remedy = "set LACONIC_CACHE to a folder on a larger disk" if free < ROOM else ""
    return Finding(name="cache", works=free >= ROOM, found=found, remedy=remedy)
