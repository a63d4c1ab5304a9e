"""Compilation with torch.compile: fewer passes over memory, and fewer saved activations."""

import importlib.util
import os
import shutil
from typing import ClassVar, Literal

import torch

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.signature import replace_forward
from train.memory.compiled_programs import keep_compiled_programs
from train.step.compatibility import Slot
from train.step.step_parts import StepParts
from train.step.technique import Technique


class Compile(Technique):
    """Compiles with torch.compile. A simulation cannot tell what it saves; only a measurement can.

    scope: blocks compiles each of the repeated layers, which share their code; step compiles the whole model with its
    loss. mode: as in torch.compile.
    """

    slot: ClassVar[Slot] = "compile"
    exact: ClassVar[bool] = True
    is_simulated: ClassVar[bool] = False

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
