"""A model's blocks, one after another, over all calibration samples: so that what is decided for a block is seen by
the next, at the cost of one pass over the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from compress.transformer.anatomy import Anatomy, Site
from laconic.models.signature import call, replace_forward

HIDDEN = "hidden_states"


@dataclass(frozen=True)
class View:
    """Of one batch, at a site, the tokens that are no padding: x: what goes into the consumer, [tokens, in]. total:
    what comes out, and is added to the residual stream, with it, [tokens, out]. residual: the stream without it."""

    x: Tensor
    total: Tensor
    residual: Tensor


class Passage:
    """Stands before a block. Memory is one hidden state for each token of the samples, or two.

    changes: the module is changed on the way; where it is not, a block that was looked at is not run again to step
    over it.
    """

    def __init__(
        self, module: nn.Module, found: Anatomy, given: Iterable[Mapping[str, Tensor]], *, changes: bool
    ) -> None:
        self._module = module
        self._found = found
        self._changes = changes
        self._states: list[Tensor] = []
        self._after: dict[int, Tensor] = {}
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self._masks: list[Tensor | None] = []
        for batch in given:
            self._begin(batch)

    def _begin(self, batch: Mapping[str, Tensor]) -> None:
        """Note what each block is called with. Only the first one works; the others hand on what it gave, since all
        that counts of them here does not depend on it."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        answers: list[Any] = []
        blocks = [self._module.get_submodule(self._found.block(index)) for index in range(len(self._found.sites))]

        def noted(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not calls:
                self._states.append(args[0] if args else kwargs[HIDDEN])
                answers.append(forward(*args, **kwargs))
            calls.append((args[1:], {name: value for name, value in kwargs.items() if name != HIDDEN}))
            return answers[0]

        undone = [replace_forward(block, partial(noted, block.forward)) for block in blocks]
        try:
            call(self._module, batch)
        finally:
            for undo in undone:
                undo()
        self._calls.append(calls)
        self._masks.append(batch.get("attention_mask"))

    def _run(self, number: int, index: int) -> Tensor:
        args, kwargs = self._calls[number][index]
        answer = self._module.get_submodule(self._found.block(index))(self._states[number], *args, **kwargs)
        hidden: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return hidden

    def see(self, site: Site) -> Iterator[View]:
        """What happens at a site of the block that it stands before, batch by batch."""
        consumer = self._module.get_submodule(site.consumer)
        first = self._module.get_submodule(site.sources[0].layer)
        seen: dict[str, Tensor] = {}

        def note_source(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen["source"] = args[0]

        def note_consumer(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            seen["x"], seen["y"] = args[0], out

        for number, state in enumerate(self._states):
            handles = [first.register_forward_pre_hook(note_source), consumer.register_forward_hook(note_consumer)]
            try:
                after = self._run(number, site.block)
            finally:
                for handle in handles:
                    handle.remove()
            if not self._changes:
                self._after[number] = after
            if site.kind == "heads":
                residual = state
            elif self._found.family.post_norm:
                residual = seen["source"]
            else:
                residual = after - seen["y"]
            x, y, residual = (self._kept(number, each) for each in (seen["x"], seen["y"], residual))
            yield View(x, residual + y, residual)

    def advance(self, index: int) -> None:
        """Step over a block."""
        numbers = range(len(self._states))
        self._states = [self._after[each] if each in self._after else self._run(each, index) for each in numbers]
        self._after.clear()

    def _kept(self, number: int, values: Tensor) -> Tensor:
        mask = self._masks[number]
        if mask is not None and values.shape[:-1] == mask.shape:
            return values[mask.bool()].float()
        return values.reshape(-1, values.shape[-1]).float()
