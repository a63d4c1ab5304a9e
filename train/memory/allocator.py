"""Settings of the memory allocators below torch, which reduce memory that is reserved and not used."""

import ctypes
import os
import sys

import torch
from pydantic import Field

from laconic.errors import RecipeError
from laconic.units import Bytes
from train.step.step_parts import StepParts
from train.step.technique import Technique

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h of glibc."""
VARIABLE, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
"""torch reads the variable once, when it first allocates on the device, and has no public function to set it."""


class Allocator(Technique):
    """On a CPU, returns blocks of at least `threshold` bytes to the system as soon as they are freed. On CUDA, uses
    expandable segments, so that batches of several lengths leave no gaps.

    glibc raises its own threshold to 32 MiB as blocks come and go, and then keeps what lies between them. Training a
    small GPT on texts of several lengths took 14 % less memory at most, 30 % less in between, and 20 % more time
    (threshold 65536: 17 %, 40 %, 35 %).
    """

    slot = "allocator"
    exact = True
    is_simulated = False

    threshold: Bytes = Field(default=2**20, ge=4096)

    def apply(self, parts: StepParts) -> None:
        if parts.device.type == "cuda":
            enable_expandable_segments()
        elif sys.platform == "linux":
            set_mmap_threshold(self.threshold)
        else:
            raise RecipeError(f"allocator: there is nothing to set on {sys.platform}. Remove it")


def set_mmap_threshold(threshold: int) -> None:
    """Set the size in bytes from which glibc maps a block by itself. Raises RecipeError for another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_MMAP_THRESHOLD, threshold) and mallopt(M_TRIM_THRESHOLD, threshold)):
        raise RecipeError("allocator: this system's C library is not glibc, and there is nothing to set. Remove it")


def enable_expandable_segments() -> None:
    """Set the environment variable of torch's CUDA allocator. Raises RecipeError if torch has read it already."""
    value = os.environ.get(VARIABLE) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if EXPANDABLE in value:
        return
    if torch.cuda.is_available() and torch.cuda.memory_reserved():
        raise RecipeError(
            f"allocator: the device's allocator has already started, and takes no settings any more. Remove allocator, "
            f"and set {VARIABLE}={EXPANDABLE} in the environment of the command"
        )
    os.environ[VARIABLE] = f"{value},{EXPANDABLE}" if value else EXPANDABLE
