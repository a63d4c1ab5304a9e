"""Where the blocks of a transformer are, and in each block the attention heads and the FFN units.

One entry of FAMILIES per architecture. A family is recognised by the names of a block's submodules and never by the
model's class, so that everything built like BERT is pruned like BERT, inside any wrapper.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.statistics.layer_inputs import weight_matrix
from laconic.errors import SourceError

UnitKind = Literal["heads", "ffn"]

HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Attributes that hold the number of attention heads, in one architecture or another."""
KEYS = ("num_key_value_heads", "num_kv_heads")
"""Attributes that hold the number of key-value heads (grouped-query attention)."""
WIDTHS = ("all_head_size", "split_size")
"""Attributes that hold the width of all heads together."""


@dataclass(frozen=True)
class BlockFamily:
    """The layers of a block of one architecture; paths are relative to the block.

    parts: the names of all children of the block, by which the family is recognised. attention: the submodule that
    holds the numbers of heads. head_width: its attribute with the width of one head. up: the layers whose outputs are
    the FFN units, one for one. post_norm: whether each half of the block ends with a normalisation of the residual sum
    (post-LN) and does not begin with one (pre-LN). config_width: the key of the model's config for the FFN width.
    """

    name: str
    parts: frozenset[str]
    attention: str
    head_width: str
    query: str
    key: str
    value: str
    out: str
    up: tuple[str, ...]
    down: str
    post_norm: bool = False
    config_width: str = "intermediate_size"

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values are the outputs of one layer, in this order."""
        return self.query == self.key

    def fits(self, block: nn.Module) -> bool:
        """Whether a module is a block of this family."""
        if {name for name, _ in block.named_children()} != self.parts:
            return False
        paths = (self.query, self.key, self.value, self.out, *self.up, self.down)
        layers = dict(block.named_modules())
        return all(isinstance(layers.get(path), (nn.Linear, Conv1D)) for path in paths) and hasattr(
            layers.get(self.attention), self.head_width
        )


FAMILIES = (
    BlockFamily(
        name="BERT and RoBERTa",
        parts=frozenset({"attention", "intermediate", "output"}),
        attention="attention.self",
        head_width="attention_head_size",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        out="attention.output.dense",
        up=("intermediate.dense",),
        down="output.dense",
        post_norm=True,
    ),
    BlockFamily(
        name="DistilBERT",
        parts=frozenset({"attention", "sa_layer_norm", "ffn", "output_layer_norm"}),
        attention="attention",
        head_width="attention_head_size",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        out="attention.out_lin",
        up=("ffn.lin1",),
        down="ffn.lin2",
        post_norm=True,
        config_width="hidden_dim",
    ),
    BlockFamily(
        name="ViT",
        parts=frozenset({"attention", "layernorm_before", "layernorm_after", "mlp", "dropout"}),
        attention="attention",
        head_width="head_dim",
        query="attention.q_proj",
        key="attention.k_proj",
        value="attention.v_proj",
        out="attention.o_proj",
        up=("mlp.fc1",),
        down="mlp.fc2",
    ),
    BlockFamily(
        name="GPT-2",
        parts=frozenset({"ln_1", "attn", "ln_2", "mlp"}),
        attention="attn",
        head_width="head_dim",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        out="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        config_width="n_inner",
    ),
    BlockFamily(
        name="Llama",
        parts=frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}),
        attention="self_attn",
        head_width="head_dim",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.o_proj",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
    ),
)


@dataclass(frozen=True)
class UnitRows:
    """The rows of a layer's weight that compute the units of a site: `width` rows a unit, from row `start` on."""

    layer: str
    width: int
    start: int = 0


@dataclass(frozen=True)
class Site:
    """The prunable units of one kind in one block: independently computed heads or FFN units that one layer consumes.

    A unit of heads is a key-value head with all query heads that share it. consumer: path of the layer that takes the
    units; each unit has `width` of its columns, in order. units: how many there are. sources: the rows that compute
    them. counts: attributes of modules that hold the number of units, by path, with what one unit adds to each.
    """

    kind: UnitKind
    block: int
    consumer: str
    units: int
    width: int
    sources: tuple[UnitRows, ...]
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a transformer. stack: path of the list of blocks. sites: for each block, its units by kind."""

    family: BlockFamily
    stack: str
    sites: tuple[Mapping[UnitKind, Site], ...]

    def block(self, index: int) -> str:
        """The path of the block with this index."""
        return f"{self.stack}.{index}"

    def of(self, kind: UnitKind) -> tuple[Site, ...]:
        """The sites of one kind, one a block, in order."""
        return tuple(sites[kind] for sites in self.sites)


def anatomy(module: nn.Module) -> Anatomy:
    """Find the blocks, heads and FFN units of a module, as its weights are shaped now.

    Raises SourceError for a module without exactly one stack of blocks of a known family.
    """
    found = [
        (family, path)
        for path, each in module.named_modules()
        if isinstance(each, nn.ModuleList) and len(each)
        for family in FAMILIES
        if all(family.fits(block) for block in each)
    ]
    if len(found) != 1:
        known = ", ".join(family.name for family in FAMILIES)
        raise SourceError(
            f"{type(module).__name__} has {len(found) or 'no'} stacks of known transformer blocks; expected "
            f"one, built like {known}. Prune another architecture by its channels (prune.channels), or add the names "
            f"of its layers as an entry of compress/transformer/anatomy.py"
        )
    family, stack = found[0]
    count = len(module.get_submodule(stack))  # type: ignore[arg-type]
    return Anatomy(family, stack, tuple(find_sites(module, family, stack, index) for index in range(count)))


def find_sites(module: nn.Module, family: BlockFamily, stack: str, index: int) -> dict[UnitKind, Site]:
    """The heads and the FFN units of one block."""
    root = f"{stack}.{index}"
    block = module.get_submodule(root)
    return {
        "heads": find_heads(block, family, root, index),
        "ffn": Site(
            kind="ffn",
            block=index,
            consumer=f"{root}.{family.down}",
            units=weight_matrix(block.get_submodule(family.down)).shape[1],
            width=1,
            sources=tuple(UnitRows(f"{root}.{path}", 1) for path in family.up),
        ),
    }


def find_heads(block: nn.Module, family: BlockFamily, root: str, index: int) -> Site:
    """The attention heads of one block."""
    attention = block.get_submodule(family.attention)
    each = int(getattr(attention, family.head_width))
    queries = weight_matrix(block.get_submodule(family.out)).shape[1] // each
    keys = queries if family.fused else len(weight_matrix(block.get_submodule(family.key))) // each
    shared = queries // keys
    made = (family.query, shared * each), (family.key, each), (family.value, each)
    start = queries * each if family.fused else 0
    counts = dict.fromkeys(HEADS, shared) | dict.fromkeys(KEYS, 1) | dict.fromkeys(WIDTHS, shared * each)
    return Site(
        kind="heads",
        block=index,
        consumer=f"{root}.{family.out}",
        units=keys,
        width=shared * each,
        sources=tuple(UnitRows(f"{root}.{path}", width, number * start) for number, (path, width) in enumerate(made)),
        counts={
            f"{root}.{family.attention}.{name}": count for name, count in counts.items() if hasattr(attention, name)
        },
    )


def iterate_configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The transformers configs inside a module, each once, with the path of one submodule that holds it."""
    seen: set[int] = set()
    for path, each in module.named_modules():
        config = getattr(each, "config", None)
        if hasattr(config, "num_hidden_layers") and id(config) not in seen:
            seen.add(id(config))
            yield path, config
