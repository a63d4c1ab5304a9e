"""Running one part of a language model at a time: the embeddings, a layer, or what follows the layers.

The model's own forward loop runs each time, so that masks and positions are its own for every family. Layers other than
the one that is wanted are passed over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.statistics.moments import ForwardStopped
from laconic.errors import SourceError
from laconic.models.language_model import disable_packing_detection
from laconic.models.repeated_layers import find_layer_lists
from laconic.models.sharded_model import ShardedModel
from train.layerwise.layer_call import HIDDEN
from train.layerwise.layer_stack import LayerProxy, hidden_of, mix_into


class PassedLayers(nn.Module):
    """Mixed into the class of a list of layers: iterating over it yields proxies that hand their calls over."""

    take_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        return (LayerProxy(layer, self.take_call) for layer in self.children())

    def __getitem__(self, index: int | slice) -> Any:
        part = super().__getitem__(index)  # type: ignore[misc]
        if not isinstance(index, slice):
            return LayerProxy(part, self.take_call)
        part.take_call = self.take_call
        return part


class LayerLoop:
    """The forward loop of a model with weights on disk, of which one part runs at a time, on one text."""

    def __init__(self, model: ShardedModel) -> None:
        """Raises SourceError for a model that does not call its layers one after another."""
        self.model, self.base = model, model.model.base_model
        stacks = find_layer_lists(self.base) or find_layer_lists(self.base, least=1)
        if len(stacks) != 1:
            raise self._refuse(f"has {len(stacks)} lists of layers, and one is expected")
        self.layers: list[nn.Module] = list(stacks[0].children())
        mix_into(stacks[0], PassedLayers, take_call=self._take_call)
        self.embeddings, self.head = model.model.get_input_embeddings(), model.model.get_output_embeddings()
        self._load_small_parts(stacks[0])
        self._target: nn.Module | None = None
        self._hidden: Tensor | None = None
        self._output: Any = None
        self._returns_tuple = False
        self._probe()

    @property
    def width(self) -> int:
        """The size of a token's hidden state."""
        return int(self._probed.shape[2])

    def embed(self, ids: Tensor) -> Tensor:
        """Return what the first layer reads, [1, tokens, width]. ids: [1, tokens] int64. The embeddings are loaded."""
        self._hidden = None
        return self._run_until_stopped(input_ids=ids)

    def run(self, number: int, hidden: Tensor) -> Tensor:
        """Return what a layer makes of hidden states, [1, tokens, width]. The layer is loaded."""
        self._hidden, self._target = hidden, self.layers[number]
        return self._run_until_stopped(inputs_embeds=hidden)

    @torch.inference_mode()
    def finish(self, hidden: Tensor) -> Tensor:
        """Return what the head reads, [1, tokens, width], of the last layer's hidden states."""
        self._hidden, self._target = hidden, None
        with disable_packing_detection():
            states: Tensor = self.base(inputs_embeds=hidden, use_cache=False).last_hidden_state
        return states * self.model.module.scale

    @torch.inference_mode()
    def _run_until_stopped(self, **inputs: Tensor) -> Tensor:
        try:
            with disable_packing_detection():
                self.base(**inputs, use_cache=False)
        except ForwardStopped:
            return hidden_of(self._output)
        raise self._refuse("does not call all of its layers in a loop over their list")

    def _take_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrived = args[0] if args else kwargs[HIDDEN]
        if self._hidden is None:
            self._output = arrived
            raise ForwardStopped
        if layer is not self.layers[0] and arrived is not self._hidden:
            raise self._refuse("does more between its layers than pass the hidden states on")
        if layer is not self._target:
            return (self._hidden,) if self._returns_tuple else self._hidden
        self._output = layer(self._hidden, *args[1:], **{key: each for key, each in kwargs.items() if key != HIDDEN})
        raise ForwardStopped

    def _load_small_parts(self, stack: nn.Module) -> None:
        """Load what is neither a layer nor an embedding of tokens nor the head, for good: norms, places."""
        large = {id(part) for root in (stack, self.embeddings, self.head) for part in root.modules()}
        for part in self.model.model.modules():
            if (
                id(part) not in large
                and any(True for _ in part.parameters(recurse=False))
                and not list(part.children())
            ):
                self.model.load(part)

    def _probe(self) -> None:
        """Run the first layer on one token, to learn what layers return."""
        with self.model.loaded(self.embeddings):
            self._probed = self.embed(torch.zeros((1, 1), dtype=torch.int64))
        with self.model.loaded(self.layers[0]):
            self.run(0, self._probed)
        self._returns_tuple = not isinstance(self._output, Tensor)

    def _refuse(self, reason: str) -> SourceError:
        kind = type(self.model.model).__name__
        return SourceError(
            f"the {kind} in {self.model.folder} {reason}, so that it cannot be run a layer at a time. Compress it to "
            f"an artifact, with the whole model in memory"
        )


@contextmanager
def observe_linear_inputs(layer: nn.Module, observe: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the path in `layer` and the input, [1, tokens, in], of each linear module that runs in the
    body."""
    handles = [
        module.register_forward_pre_hook(lambda module, args, path=path: observe(path, args[0]))
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
