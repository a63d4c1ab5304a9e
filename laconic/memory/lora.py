"""Small matrices that learn beside frozen weights, and are merged into them at the end."""

import importlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from transformers.pytorch_utils import Conv1D

from laconic import registry
from laconic.errors import RecipeError
from laconic.training.step.parts import Kit, blocks
from laconic.training.step.technique import Slot, Technique

LINEAR = (nn.Linear, Conv1D)
"""Kinds of layers that take an adapter, and no kinds made from them: what their forward pass does is not known."""

ADAPTER = "default"
"""What peft calls the one adapter that there is."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Lora(Technique):
    """The weights W [out, in] of a linear layer stay as they are; A [rank, in] and B [out, rank] learn, in float32:
    y = W x + alpha / rank * B A x (Hu et al. 2021, arXiv:2106.09685; by peft). B begins as zeros.

    Frozen weights have neither gradients nor an optimizer's state. While it is trained, an adapted layer's parameters
    are called by peft's names: `base_layer.weight`, `lora_A.default.weight`, `lora_B.default.weight`. A is drawn from
    torch's own generator, which whoever applies the technique has seeded.
    When it is taken off, the module is back where it was, float32, of the classes and names that it had, with
    W + alpha / rank * B A as weights: its answers are those of the trained one (to rounding where base is bfloat16,
    since the training has rounded each layer's answer, and the merged module does not).
    """

    slot: ClassVar[Slot] = "weights"
    exact: ClassVar[bool] = False
    places: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "frozen weights have no gradients and no optimizer's state for the host to hold",
        "pure-bf16": "adapters learn in float32; base: bfloat16 is for the frozen weights",
    }

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what goes into A."""
    targets: tuple[str, ...] | None = None
    """Linear layers by name or by the end of their names, as "q_proj"; None takes all in the repeated blocks."""
    train_head: bool = True
    """Whether the linear layers after the blocks learn, in full: a classifier, a projection. An output layer over a
    vocabulary stays frozen."""
    base: Literal["float32", "bfloat16"] = "float32"
    """The dtype of what is frozen; with bfloat16 the forward pass is under autocast."""

    def apply(self, kit: Kit) -> None:
        module = kit.module
        names = chosen(module, self.targets)
        learned = head(module, names) if self.train_head else []
        before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        home = next(module.parameters()).device
        layers = self._inject(kit, names)
        for layer in learned:
            layer.requires_grad_(True)
        self._keep(kit, layers)
        place(kit, DTYPES[self.base])
        if self.base != "float32":
            kit.forward.append(partial(torch.autocast, kit.device.type, dtype=DTYPES[self.base]))

        def undo() -> None:
            module.to(home)
            for name, layer in layers.items():
                self._restore(layer)
                layer.float().merge()
                module.set_submodule(name, layer.get_base_layer())
            module.float()
            del module.peft_config
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(before[name])

        kit.undo.append(undo)

    def _inject(self, kit: Kit, names: Sequence[str]) -> dict[str, Any]:
        """Put peft's layers, by name, in the place of the chosen ones; everything but the adapters is frozen."""
        peft, module = library(), kit.module
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules="|".join(re.escape(name) for name in names),
            fan_in_fan_out=isinstance(module.get_submodule(names[0]), Conv1D),
        )
        with quiet(), torch.device("meta"):
            peft.inject_adapter_in_model(config, module)
        layers: dict[str, Any] = {name: module.get_submodule(name) for name in names}
        for layer in layers.values():
            for matrix in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
                matrix.weight = nn.Parameter(torch.empty(matrix.weight.shape, dtype=torch.float32, device=kit.device))
            layer.reset_lora_parameters(ADAPTER, True)
            layer.cast_input_dtype_enabled = False  # autocast does so, without a copy in float32 on the way
        return layers

    def _keep(self, kit: Kit, layers: Mapping[str, Any]) -> None:
        """Keep the frozen weights in another form."""

    def _restore(self, layer: Any) -> None:
        """The frozen weights in the form that they had."""


def chosen(module: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """The names of the layers that take an adapter. Raises RecipeError where there are none."""
    inside = {part for block in blocks(module) for part in block.modules()}
    linear = {name: part for name, part in module.named_modules() if type(part) in LINEAR}
    if targets is None:
        names = [name for name, part in linear.items() if part in inside]
        if not names:
            raise RecipeError(
                f"adapters stand beside the linear layers of repeated blocks, and {type(module).__name__} has none. "
                f"Name linear layers in targets ({', '.join(sorted(linear)[:5]) or 'there are none'}), or train without"
            )
    else:
        ends = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
        for target, found in ends.items():
            if not found:
                hint = registry.did_you_mean(target, {name.rpartition(".")[2] for name in linear})
                raise RecipeError(f"targets: there is no linear layer {target!r} in {type(module).__name__}. {hint}")
        names = [name for name in linear if any(name in found for found in ends.values())]
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    shared = [name for name in names if uses[id(linear[name].weight)] > 1]
    if shared:
        raise RecipeError(
            f"the weights of {shared[0]} are those of another layer too, so an adapter cannot be merged into them. "
            f"Leave it out of targets"
        )
    return names


def head(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The linear layers that come after the adapted ones and after the blocks, but for one over a vocabulary."""
    parts = dict(module.named_modules())
    order = list(parts)
    inside = {part for block in blocks(module) for part in block.modules()}
    tables = {id(part.weight) for part in parts.values() if isinstance(part, nn.Embedding)}
    words = [part.get_output_embeddings() for part in parts.values() if hasattr(part, "get_output_embeddings")]
    after = [parts[name] for name in order[order.index(names[-1]) + 1 :]]
    return [
        part
        for part in after
        if type(part) in LINEAR
        and part not in inside
        and id(part.weight) not in tables
        and not any(part is word for word in words)
    ]


def place(kit: Kit, base: torch.dtype) -> None:
    """Put the module on the kit's device, what is frozen in `base`."""
    for tensor in chain(kit.module.parameters(), kit.module.buffers()):
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.is_floating_point()
        tensor.data = kit.host.get(tensor.data, dtype=base if frozen else None, category="parameters")
        kit.host.wait()


def library() -> Any:
    """peft. Raises MissingPackage where it is not installed."""
    try:
        with quiet():
            return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise registry.missing_package(error.name or "peft") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what peft, and the libraries that it opens where they are there, say of kernels that they lack and of
    Conv1D, which they handle all the same."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
