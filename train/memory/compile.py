"""Compilation with torch.compile: fewer passes over memory, and fewer saved activations."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from laconic.cache import Cache
from laconic.errors import RecipeError
from laconic.hardware import this_machine
from laconic.hashing import hash_of, read_arithmetic_variables
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from train.step.step_parts import StepParts
from train.step.technique import Technique

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compile(Technique):
    """Compiles with torch.compile. A simulation cannot tell what it saves; only a measurement can.

    scope: blocks compiles each of the repeated layers, which share their code; step compiles the whole model with its
    loss. mode: as in torch.compile.
    """

    slot = "compile"
    exact = True
    is_simulated = False
    excludes: ClassVar[Mapping[str, str]] = {
        "context": "a compiled layer does not gather keys and values",
        "zero": "DeepSpeed works in hooks, which a compiled model does not call",
    }

    scope: Literal["blocks", "step"] = "blocks"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"

    def apply(self, parts: StepParts) -> None:
        check_compiler(parts.device)
        keep_compiled_programs()
        if self.scope == "step":
            parts.wrap_loss_module(lambda lesson: torch.compile(lesson, mode=self.mode))  # type: ignore[return-value, arg-type]
            return
        layers = find_layers(parts.module)
        if not layers:
            raise RecipeError(
                "compile: the model has no repeated layers (a ModuleList or Sequential of modules of one class). "
                "Set scope: step"
            )
        for layer in layers:
            parts.on_restore(replace_forward(layer, torch.compile(layer.forward, mode=self.mode)))


def check_compiler(device: torch.device) -> None:
    """Raise RecipeError if the compiler that torch.compile needs is not installed."""
    if device.type == "cpu":
        if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl") if name):
            raise RecipeError("compile: there is no C++ compiler on this machine. Install g++, or remove compile")
    elif importlib.util.find_spec("triton") is None:
        raise RecipeError("compile: Triton is not installed, which compiles for a GPU. Install it, or remove compile")


def keep_compiled_programs() -> None:
    """Have torch's compiler keep its programs in Laconic's cache, apart for each set of instructions, unless the
    environment names a folder.

    By default it keeps them in the shared folder for temporary files, where others may write. It finds them by the
    graph, and not by the processor's instructions (torch 2.13): a program for AVX-512 that a process held to AVX2 found
    in a shared folder read beyond its arrays, and crashed or trained on wrong values.
    """
    if os.environ.get(VARIABLE) in (None, default_cache_dir()):  # the latter where torch has set it by itself
        instructions = hash_of(this_machine().features, read_arithmetic_variables())
        os.environ[VARIABLE] = str(Cache().folder / "torch-compile" / instructions)
