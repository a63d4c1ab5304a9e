"""Context parallelism: each rank has a part of the positions of its rows, and in each attention the keys and values of
all (as Llama 3 was trained: Grattafiori et al., arXiv 2407.21783, section 3.3.2)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from laconic.errors import RecipeError
from laconic.models.language_model import LanguageModel
from laconic.models.pretrained import is_close
from laconic.tasks.token_positions import IGNORED
from train.objectives.row_positions import AllPositions
from train.step.objective import TARGETS, Batch, Objective
from train.step.step_parts import StepParts

NAME = "laconic_context"
"""What transformers calls the attention. It makes no masks for one that it does not know."""
OTHERS = ("sliding_window", "s_aux", "softcap", "position_bias")
"""Settings of attentions that are more, or less, than causal attention to all earlier positions."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary positions whose frequencies follow from the last position of the tensor at hand."""
PROBE_RANKS, PROBE_LENGTH = 2, 4
"""Ranks and positions with which a model is tried: the fewest that context parallelism has."""


class PositionPart:
    """The positions of a rank along `context`: of two equal chunks for each rank, the one with its number counted from
    the first and the one counted from the last, so that causal attention takes all ranks the same time."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.chunks = rank, 2 * ranks - 1 - rank
        self.count = 2 * ranks
        self._mask = torch.empty(0)

    def cut(self, rows: Tensor) -> Tensor:
        """Cut the positions out of [rows, positions, ...], whose number is a multiple of that of the chunks."""
        chunks = rows.chunk(self.count, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def order(self, parts: Tensor) -> Tensor:
        """Put what all ranks have cut, one after the other along the first axis, into the order of positions."""
        chunks = parts.chunk(self.count)
        return torch.cat([*chunks[::2], *chunks[::-2]])

    def attend(self, query: Tensor, both: Tensor, width: int, settings: Mapping[str, Any]) -> Tensor:
        """Attend causally to all positions up to each query's own.

        query: of these positions, [rows, heads, part, width]. both: the keys, of `width`, and the values of all
        positions, [rows, key-value heads, positions, width + value width]. Returns [rows, part, heads, value width].
        """
        size, outputs = query.shape[2] // 2, []
        for part, number in zip(query.to(both.dtype).chunk(2, dim=2), self.chunks, strict=True):
            end = (number + 1) * size
            key, value = both[:, :, :end, :width], both[:, :, :end, width:]
            mask: Any = causal_lower_right(size, end) if query.is_cuda else self._make_mask(size, end, both)
            outputs.append(attend_causally(part, key, value, mask, settings))
        return torch.cat(outputs, dim=1)

    def _make_mask(self, size: int, end: int, like: Tensor) -> Tensor:
        """Make the mask of `size` queries, the last of `end` keys, [size, end]: the end of one that all layers share,
        in the dtype of the products, since a kernel of the CPU keeps a copy of any other for the backward pass."""
        shape = size, size * self.count
        if self._mask.shape != shape or self._mask.dtype != like.dtype:
            later = torch.full((size, size), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
            self._mask = pad(later, (shape[1] - size, 0))
        return self._mask[:, -end:]


class ContextPositions(AllPositions):
    """The positions of a batch of which this rank along `context` computes the losses."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: the ranks that have the same rows."""
        self._mesh, self._is_cut = mesh, False
        self._part = PositionPart(mesh.get_local_rank(), mesh.size())

    @contextmanager
    def select(self, batch: Batch) -> Iterator[Batch]:
        # Targets are those of the whole row, cut as their inputs are. No mask: what pads a row is behind its tokens.
        ids = batch["input_ids"]
        rows, length = ids.shape
        spare = -length % self._part.count
        positions = torch.arange(length + spare, device=ids.device).clamp(max=length - 1)[None]
        self._is_cut = True
        try:
            yield {
                "input_ids": self._part.cut(pad(ids, (0, spare))),
                "position_ids": self._part.cut(positions).expand(rows, -1),
                TARGETS: self._part.cut(pad(batch[TARGETS], (0, spare), value=IGNORED)),
            }
        finally:
            self._is_cut = False

    def sum(self, loss: Tensor) -> Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=self._mesh.get_group())
        return total

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **settings: Any) -> Any:
        """Compute an attention of transformers: of this rank's positions in a step, which checkpoints repeat in the
        backward pass, and of whole rows when answers are generated."""
        if not (self._is_cut or module.training):
            return attend_causally(query, key, value, None, settings).contiguous(), None
        both, width = join_pairs(key, value), key.shape[-1]
        # Positions lie along the first axis, which is gathered without a copy.
        local = DTensor.from_local(both.permute(2, 0, 1, 3).contiguous(), self._mesh, [Shard(0)], run_check=False)
        gathered = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self._part.attend(query, self._part.order(gathered).permute(1, 2, 0, 3), width, settings), None


def attend_causally(query: Tensor, key: Tensor, value: Tensor, mask: Any, settings: Mapping[str, Any]) -> Tensor:
    """Return the attention of queries, [rows, heads, queries, width], as [rows, queries, heads, value width].

    mask: None where there are as many keys as queries. settings: as transformers gives them. Raises RecipeError for
    those of another attention.
    """
    if others := [name for name in OTHERS if settings.get(name) is not None]:
        raise refuse(f"its attention has {others[0]}, and must be to all earlier positions alike")
    is_grouped, dropout = key.shape[1] != query.shape[1], settings.get("dropout", 0.0)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, mask is None, scale=settings.get("scaling"), enable_gqa=is_grouped
    ).transpose(1, 2)


def join_pairs(key: Tensor, value: Tensor) -> Tensor:
    """Join keys and values along their last axis, in the dtype in which products are computed."""
    device, both = key.device.type, torch.cat([key, value], dim=-1)
    return both.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else both


def check_context(module: nn.Module, objective: Objective, mesh: DeviceMesh) -> None:
    """Raise RecipeError for a model or an objective of which ranks that have a part of the positions each do not
    compute what one process does. module: before techniques."""
    if not (hasattr(objective, "positions") and isinstance(module, LanguageModel)):
        raise refuse("it is for language models that learn the next token, and this one learns something else")
    check_settings(module, mesh.size())
    if dist.get_backend(mesh.get_group()) != "fake":  # where tensors have no values to compare
        check_model(module)


def spread_rows(parts: StepParts, mesh: DeviceMesh) -> None:
    """Let each rank of `mesh`, which have the same rows, compute its positions of them alone, of a model that
    `check_context` has accepted."""
    model: Any = parts.module
    objective: Any = parts.objective
    whole, positions = objective.positions, ContextPositions(mesh)
    parts.on_restore(replace_attention(model.model, positions.attend))
    objective.positions = positions
    parts.on_restore(lambda: setattr(objective, "positions", whole))


def check_settings(module: LanguageModel, ranks: int) -> None:
    """Raise RecipeError for a model that attends otherwise than to all earlier positions, or takes too few."""
    config: Any = module.model.config
    config = config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    if kinds:
        raise refuse(f"it has layers of {', '.join(sorted(kinds))}, and all must attend to all earlier positions")
    if any(kind in str(getattr(part, "rope_type", "")) for part in module.modules() for kind in LENGTH_DEPENDENT):
        raise refuse("its rotary positions depend on the length of the row, of which each rank has a part")
    longest = getattr(config, "max_position_embeddings", None) or 0
    if 0 < longest < 2 * ranks:
        raise refuse(f"{ranks} ranks have two parts of a row each, and it takes {longest} positions")


def check_model(module: LanguageModel) -> None:
    """Raise RecipeError for a model whose hidden states depend on other positions by more than causal attention, such
    as a recurrent one, by computing both parts of a short row as two rows."""
    parts = [PositionPart(rank, PROBE_RANKS) for rank in range(PROBE_RANKS)]
    device = next(module.parameters()).device
    row = torch.arange(PROBE_LENGTH, device=device)[None]
    both_parts, first = torch.cat([part.cut(row) for part in parts]), parts[0]

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **settings: Any) -> Any:
        pairs = first.order(join_pairs(key, value).transpose(1, 2).flatten(0, 1)).transpose(0, 1)[None]
        queries = zip(parts, query.chunk(PROBE_RANKS), strict=True)
        return torch.cat([part.attend(own, pairs, key.shape[-1], settings) for part, own in queries]), None

    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            expected = module.hidden(row)
            restore = replace_attention(module.model, attend)
            try:
                actual = module.hidden(both_parts, position_ids=both_parts)
            finally:
                restore()
    finally:
        module.train(was_training)
    if not is_close(actual, torch.cat([part.cut(expected) for part in parts])):
        raise refuse("its hidden states depend on other positions by more than causal attention")


def replace_attention(model: Any, attend: Callable[..., Any]) -> Callable[[], None]:
    """Let a model of transformers compute its attention by a function; gives what undoes it. Raises RecipeError."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise refuse(f"the attention of {type(model).__name__} cannot be replaced")
    return lambda: model.set_attn_implementation(before)


def refuse(reason: str) -> RecipeError:
    """Make the error for a model whose rows cannot be spread."""
    return RecipeError(f"mesh: context cannot spread the rows of this model: {reason}. Leave context out")
