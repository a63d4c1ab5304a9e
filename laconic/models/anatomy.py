"""Where the blocks of a transformer are, and in each block the attention heads and the FFN units.

Blocks are found by the shapes of their layers, and never by the class of the model. The proof of each cut shows whether
what the shapes say is so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from laconic.errors import SourceError
from laconic.models.block_shape import BlockShape, find_shape, find_tables, linear_shape, read_head_width

UnitKind = Literal["heads", "ffn"]
UNITS: dict[UnitKind, str] = {"heads": "attention heads", "ffn": "FFN units"}

HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Attributes that hold the number of attention heads, in one architecture or another."""
KEYS = ("num_key_value_heads", "num_kv_heads")
"""Attributes that hold the number of key-value heads (grouped-query attention)."""
GROUPS = ("num_key_value_groups",)
"""Attributes that hold the number of query heads that share a key-value head."""
WIDTHS = ("all_head_size", "split_size", "attn_dim", "inner_dim")
"""Attributes that hold the width of all heads together."""


@dataclass(frozen=True)
class UnitRows:
    """The rows of a layer's weight that compute the units of a site: `width` rows a unit, from row `start` on."""

    layer: str
    width: int
    start: int = 0


@dataclass(frozen=True)
class Site:
    """The prunable units of one kind in one block: independently computed heads or FFN units that one layer consumes.

    A unit of heads is a key-value head with all query heads that share it; or a query head, where all share one
    key-value head. consumer: path of the layer that takes the units; each unit has `width` of its columns, in order.
    units: how many there are. sources: the rows that compute them. counts: attributes of modules that hold the number
    of units, by path, with what one unit adds to each. tables: parameters with entries for each unit along an axis.
    head: features of one head; 1 for FFN units. keys: key-value heads that stay whatever is cut; 0 where they go along.
    """

    kind: UnitKind
    block: int
    consumer: str
    units: int
    width: int
    sources: tuple[UnitRows, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    tables: tuple[tuple[str, int], ...] = ()
    head: int = 1
    keys: int = 0


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a transformer. shape: of the first block. blocks: their paths, in order. sites: for each block, its
    units by kind."""

    shape: BlockShape
    blocks: tuple[str, ...]
    sites: tuple[Mapping[UnitKind, Site], ...]

    def block(self, index: int) -> str:
        """Return the path of the block with this index."""
        return self.blocks[index]

    @property
    def stacks(self) -> tuple[str, ...]:
        """The paths of the lists that the blocks are in."""
        return tuple(dict.fromkeys(path.rpartition(".")[0] for path in self.blocks))

    @property
    def stack(self) -> str:
        """The path of the one list of blocks. Raises SourceError where there are several, as in Swin: blocks of one
        cannot take the place of another's, nor can a list be left empty."""
        if len(self.stacks) > 1:
            raise SourceError(
                f"the blocks are in {len(self.stacks)} lists ({', '.join(self.stacks[:3])}...), and whole blocks can "
                f"be removed from one list alone. Use prune.ffn or prune.heads"
            )
        return self.stacks[0]

    def of(self, kind: UnitKind) -> tuple[Site, ...]:
        """Return the sites of one kind, one a block, in order. Raises SourceError where blocks have none."""
        if not all(kind in sites for sites in self.sites):
            other = next((f"prune.{known}" for known in self.sites[0] if known != kind), "factorize.low-rank")
            raise SourceError(
                f"the blocks in {self.stacks[0]} have no {UNITS[kind]} that can be cut. Leave prune.{kind} out, or use "
                f"{other}"
            )
        return tuple(sites[kind] for sites in self.sites)


def anatomy(module: nn.Module) -> Anatomy:
    """Find the blocks, heads and FFN units of a module, as its weights are shaped now.

    Blocks are members of lists that have one attention and a feed-forward network, or where there are no such ones,
    only one of both. Raises SourceError for a module without any.
    """
    shapes = {
        f"{path}.{name}".lstrip("."): shape
        for path, each in module.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential))
        for name, block in each.named_children()
        if (shape := find_shape(block))
    }
    best = max(map(count_kinds, shapes.values()), default=(False, False))
    shapes = {path: shape for path, shape in shapes.items() if count_kinds(shape) == best}
    # A list of blocks may lie in a list of groups of blocks, which looks like a block where it has one.
    shapes = {path: shape for path, shape in shapes.items() if not any(each.startswith(f"{path}.") for each in shapes)}
    if not shapes:
        raise SourceError(
            f"{type(module).__name__} has no transformer blocks; expected a list of blocks, each with one attention or "
            f"one feed-forward network. {suggest_stage(module)}"
        )
    sites = tuple(find_sites(module, shape, path, index) for index, (path, shape) in enumerate(shapes.items()))
    return Anatomy(next(iter(shapes.values())), tuple(shapes), sites)


def count_kinds(shape: BlockShape) -> tuple[bool, bool]:
    """Whether a block has heads, and whether it has units, that can be cut."""
    return bool(shape.heads), shape.down is not None


def suggest_stage(module: nn.Module) -> str:
    """Return what to try on a model whose blocks are not found."""
    attends = any(read_head_width(part) for part in module.modules())
    if not attends and any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return "Prune a convolutional network by its channels (prune.channels)"
    return "Use factorize.low-rank, or prune.unstructured"


def find_sites(module: nn.Module, shape: BlockShape, root: str, index: int) -> dict[UnitKind, Site]:
    """Return the heads and the FFN units of the block at the path `root`."""
    block = module.get_submodule(root)
    sites: dict[UnitKind, Site] = {"heads": find_heads(block, shape, root, index)} if shape.heads else {}
    if shape.down is not None:
        _, units = linear_shape(block.get_submodule(shape.down))
        sources = [UnitRows(f"{root}.{path}", 1) for path in shape.up]
        if shape.gated_in_one:
            sources.append(UnitRows(f"{root}.{shape.up[0]}", 1, units))
        depthwise = [f"{root}.{path}" for path in shape.between]
        sites["ffn"] = Site(
            kind="ffn",
            block=index,
            consumer=f"{root}.{shape.down}",
            units=units,
            width=1,
            sources=tuple(sources),
            counts={f"{path}.{name}": 1 for path in depthwise for name in ("groups", "in_channels", "out_channels")},
            tables=tuple((name, 0) for name, _ in module.named_parameters() if name.rpartition(".")[0] in depthwise),
        )
    return sites


def find_heads(block: nn.Module, shape: BlockShape, root: str, index: int) -> Site:
    """Return the attention heads of one block."""
    attention, width = block.get_submodule(shape.attention), shape.head_width
    config = getattr(attention, "config", None)
    # A cut of key-value heads may leave one; the config still says how many there were until the cut is complete.
    alone = shape.keys == 1 < shape.heads and getattr(config, "num_key_value_heads", None) == 1
    shared = 1 if alone else shape.heads // shape.keys
    counts = dict.fromkeys(HEADS, shared) | dict.fromkeys(WIDTHS, shared * width)
    counts |= dict.fromkeys(GROUPS, 1) if alone else dict.fromkeys(KEYS, 1)
    return Site(
        kind="heads",
        block=index,
        consumer=f"{root}.{shape.out}",
        units=shape.heads // shared,
        width=shared * width,
        sources=tuple(find_head_rows(block, shape, root, shared, alone=alone)),
        counts={
            f"{root}.{shape.attention}.{name}": count for name, count in counts.items() if hasattr(attention, name)
        },
        tables=tuple(
            (f"{root}.{path}", axis)
            for path, axis in find_tables(block, shape)
            if shared == 1 or path.rpartition(".")[0] == shape.attention
        ),
        head=width,
        keys=1 if alone else 0,
    )


def find_head_rows(block: nn.Module, shape: BlockShape, root: str, shared: int, *, alone: bool) -> Iterator[UnitRows]:
    """Yield the rows of the projections that compute one unit of heads. shared: query heads of a unit. alone: whether
    the unit is a query head, and the one key-value head stays."""
    width, queries = shape.head_width, shape.heads * shape.head_width
    if shape.interleaved:
        yield UnitRows(f"{root}.{shape.query}", 3 * width)
    elif shape.fused:
        yield UnitRows(f"{root}.{shape.query}", shared * width)
        for number in range(0 if alone else 2):
            yield UnitRows(f"{root}.{shape.query}", width, queries + number * shape.keys * width)
    else:
        for path in shape.projections:
            rows, _ = linear_shape(block.get_submodule(path))
            if not alone or rows == queries:
                yield UnitRows(f"{root}.{path}", shared * width if rows == queries else width)


def iterate_configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the transformers configs inside a module, each once, with the path of one submodule that holds it."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        config = getattr(part, "config", None)
        if hasattr(config, "num_hidden_layers") and id(config) not in seen:
            seen.add(id(config))
            yield path, config
