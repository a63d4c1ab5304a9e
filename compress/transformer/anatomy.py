"""Where the blocks of a transformer are, and in each block the attention heads and the feed-forward units.

One entry of FAMILIES per architecture, told by the names of what is inside a block and never by the model's class: so
whatever is built like BERT is cut like BERT, inside whatever wrapper.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from laconic.errors import SourceError

Kind = Literal["heads", "ffn"]

HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Attributes in which attention keeps how many heads it has, in one architecture or another."""
KEYS = ("num_key_value_heads", "num_kv_heads")
"""And how many of them have keys and values of their own."""
WIDTHS = ("all_head_size", "split_size")
"""And the width of all heads together."""


@dataclass(frozen=True)
class Family:
    """Where things are in a block; paths are relative to the block.

    parts: the names of the block's children, all of them, by which the family is known. attention: what keeps the
    counts of heads. head_width: its attribute with the width of one head. fused: queries, keys and values are one
    layer, in this order. up: the layers whose outputs are the feed-forward units, one for one. post_norm: each half of
    the block ends with a normalisation, of the sum with what went into the half; else it begins with one. config_width:
    the config's name for the count of feed-forward units.
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
    Family(
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
    Family(
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
    Family(
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
    Family(
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
    Family(
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
class Source:
    """Rows of a layer that belong to the units of a site: `width` rows a unit, from row `start` on."""

    layer: str
    width: int
    start: int = 0


@dataclass(frozen=True)
class Site:
    """Units that are computed apart from one another and meet in one layer: heads, or feed-forward units.

    A head is a key with its values and all the queries that share it. consumer: path of the layer where they meet, of
    whose columns each unit has `width`, in their order. sources: the layers that make them. counts: what the modules
    keep of how many there are, as path of the attribute and what one unit counts.
    """

    kind: Kind
    block: int
    consumer: str
    units: int
    width: int
    sources: tuple[Source, ...]
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Anatomy:
    """stack: path of the list of blocks. sites: of each block, by kind."""

    family: Family
    stack: str
    sites: tuple[Mapping[Kind, Site], ...]

    def block(self, index: int) -> str:
        """The path of a block."""
        return f"{self.stack}.{index}"

    def of(self, kind: Kind) -> tuple[Site, ...]:
        """The sites of one kind, a block each, in their order."""
        return tuple(sites[kind] for sites in self.sites)


def anatomy(module: nn.Module) -> Anatomy:
    """Where the blocks, heads and feed-forward units of a module are, as its weights are shaped now.

    Raises SourceError for a module without a stack of blocks that is known.
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
            f"{type(module).__name__} has {len(found) or 'no'} stacks of transformer blocks that are known; expected "
            f"one, built like {known}. Prune another architecture by its channels (prune.channels), or give the names "
            f"of its layers in an entry of compress/transformer/anatomy.py"
        )
    family, stack = found[0]
    count = len(module.get_submodule(stack))  # type: ignore[arg-type]
    return Anatomy(family, stack, tuple(sites_of(module, family, stack, index) for index in range(count)))


def sites_of(module: nn.Module, family: Family, stack: str, index: int) -> dict[Kind, Site]:
    """The heads and the feed-forward units of one block."""
    root = f"{stack}.{index}"
    block = module.get_submodule(root)
    return {
        "heads": heads_of(block, family, root, index),
        "ffn": Site(
            kind="ffn",
            block=index,
            consumer=f"{root}.{family.down}",
            units=features(block.get_submodule(family.down))[0],
            width=1,
            sources=tuple(Source(f"{root}.{path}", 1) for path in family.up),
        ),
    }


def heads_of(block: nn.Module, family: Family, root: str, index: int) -> Site:
    """The heads of one block."""
    attention = block.get_submodule(family.attention)
    each = int(getattr(attention, family.head_width))
    queries = features(block.get_submodule(family.out))[0] // each
    keys = queries if family.fused else features(block.get_submodule(family.key))[1] // each
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
        sources=tuple(Source(f"{root}.{path}", width, number * start) for number, (path, width) in enumerate(made)),
        counts={
            f"{root}.{family.attention}.{name}": count for name, count in counts.items() if hasattr(attention, name)
        },
    )


def features(layer: nn.Module) -> tuple[int, int]:
    """How many values go into a layer, and how many come out."""
    weight: Any = layer.weight
    out, into = weight.shape[::-1] if isinstance(layer, Conv1D) else weight.shape
    return int(into), int(out)


def configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configs of transformers that a module keeps, each once, with the path of one module that keeps it."""
    seen: set[int] = set()
    for path, each in module.named_modules():
        config = getattr(each, "config", None)
        if hasattr(config, "num_hidden_layers") and id(config) not in seen:
            seen.add(id(config))
            yield path, config
