"""Search space: the axes that a search varies, and the layers that a setting leaves, predicted from the layer specs.

To add an axis: one entry of AXES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compress.search.layer_spec import LayerSpec
from laconic import registry
from laconic.recipes.recipe import HEAL, NamedStage, Recipe

Settings = Mapping[str, float]
"""Values by axis name, for the axes that are not left as they are."""

LayerSpecs = tuple[LayerSpec, ...]
WHOLE = 1.0
MULTIPLE = 8
"""Predicted widths are multiples of it."""


@dataclass(frozen=True)
class Axis:
    """One axis of the search space: a setting of a stage.

    stage, setting: their names in a recipe. values: of the setting, from the mildest to the strongest; WHOLE, which
    leaves the stage out, is always allowed. applies: whether a model with these layers has something for the stage.
    predict: the layers that remain with a value, approximately. config: other settings of the stage in a search.
    first: whether the first trials vary it. Removing whole blocks is coarse, and low-rank factorization makes two
    layers of one, which seldom pays by itself.
    """

    name: str
    stage: str
    setting: str
    values: tuple[float, ...]
    applies: Callable[[LayerSpecs], bool]
    predict: Callable[[LayerSpecs, float], LayerSpecs]
    config: Mapping[str, object] = field(default_factory=dict)
    first: bool = True


def has_role(*wanted: str) -> Callable[[LayerSpecs], bool]:
    """A predicate: whether some layer has one of these roles."""
    return lambda specs: any(spec.role in wanted for spec in specs)


def has_blocks(specs: LayerSpecs) -> bool:
    """Whether the model has more than one block."""
    return len({spec.block for spec in specs if spec.block is not None}) > 1


def has_matrices(specs: LayerSpecs) -> bool:
    """Whether some layer is wide enough for low-rank factors to be smaller than its weight."""
    return any(spec.weight and min(spec.width) >= 2 * MULTIPLE for spec in specs)


def keep_blocks(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Keep a share of the blocks: each layer of a block counts that share."""
    return tuple(spec if spec.block is None else replace(spec, count=spec.count * keep) for spec in specs)


def keep_units(producer: str, consumer: str) -> Callable[[LayerSpecs, float], LayerSpecs]:
    """A prediction that keeps a share of the units between layers of two roles, which produce and consume them."""

    def predict(specs: LayerSpecs, keep: float) -> LayerSpecs:
        def change(spec: LayerSpec) -> LayerSpec:
            inputs, outputs = spec.width
            if spec.role == producer:
                return spec.resize(inputs, round_width(outputs * keep))
            return spec.resize(round_width(inputs * keep), outputs) if spec.role == consumer else spec

        return tuple(change(spec) for spec in specs)

    return predict


def keep_heads(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Keep a share of the heads: in their projections, and in the attention between."""
    found = keep_units("qkv", "attention-output")(specs, keep)
    return tuple(spec.keep_heads(keep) if spec.kind == "attention" else spec for spec in found)


def keep_channels(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Keep a share of the channels everywhere except at the model's input and output."""
    found = []
    for number, spec in enumerate(specs):
        inputs, outputs = spec.width
        first, last = number == 0, number == len(specs) - 1
        if spec.role == "channels" or last:
            spec = spec.resize(
                inputs if first else round_width(inputs * keep), outputs if last else round_width(outputs * keep)
            )
        found.append(spec)
    return tuple(found)


def factorize(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Replace each layer by two low-rank factors, which together have a share of its weights."""
    found: list[LayerSpec] = []
    for spec in specs:
        if not spec.weight:
            found.append(spec)
            continue
        rank = round_width(
            keep * spec.parameters / spec.count / (spec.weight[0] + spec.parameters / spec.count / spec.weight[0])
        )
        inputs, outputs = spec.width
        if spec.groups > 1 or rank >= min(inputs, outputs) or min(inputs, outputs) < 2 * MULTIPLE:
            found.append(spec)
            continue
        found.append(spec.resize(inputs, rank))
        ones = tuple(1 for _ in spec.weight[2:])
        shape = (spec.shape[0], rank, *output_size(spec)) if spec.kind == "conv" else (*spec.shape[:-1], rank)
        found.append(
            replace(
                spec,
                shape=shape,
                weight=(outputs, rank, *ones),
                stride=ones,
                padding=tuple(0 for _ in ones),
                dilation=ones,
            )
        )
    return tuple(found)


def output_size(spec: LayerSpec) -> tuple[int, ...]:
    """The height and width, or length, of a convolution's output."""
    parts = zip(spec.shape[2:], spec.weight[2:], spec.stride, spec.padding, spec.dilation, strict=True)
    return tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in parts
    )


def round_width(width: float) -> int:
    """Round a width up to a multiple, as the stages do."""
    return max(MULTIPLE * -(-round(width) // MULTIPLE), MULTIPLE)


HEADS = (0.84, 0.75, 0.67, 0.5, 0.34)
WIDTHS = (0.84, 0.75, 0.67, 0.5, 0.375, 0.25)
RANKS = (0.75, 0.5, 0.375, 0.25)
BLOCKS = (0.84, 0.67, 0.5, 0.34)

AXES = (
    Axis("layers", "prune.layers", "keep", BLOCKS, has_blocks, keep_blocks, first=False),
    Axis("heads", "prune.heads", "keep", HEADS, has_role("attention-output"), keep_heads),
    Axis("ffn", "prune.ffn", "keep", WIDTHS, has_role("up"), keep_units("up", "down")),
    Axis("channels", "prune.channels", "keep", WIDTHS, has_role("channels"), keep_channels),
    Axis("rank", "factorize.low-rank", "keep", RANKS, has_matrices, factorize, first=False),
)
"""The axes in the order in which their stages run."""


def describe_settings(settings: Settings) -> str:
    """The settings for people: `heads 0.5, ffn 0.25`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "nothing cut"


def find_axes(specs: LayerSpecs) -> tuple[Axis, ...]:
    """The axes that apply to a model with these layers, and whose stage is registered."""
    return tuple(axis for axis in AXES if axis.stage in registry.STAGES and axis.applies(specs))


def predict_specs(specs: LayerSpecs, settings: Settings, among: Sequence[Axis] = AXES) -> LayerSpecs:
    """The layers that remain with these settings, as if each stage pruned all layers by the same share."""
    for axis in among:
        if axis.name in settings:
            specs = axis.predict(specs, settings[axis.name])
    return specs


def apply_settings(
    recipe: Recipe, settings: Settings, healing_steps: Sequence[int], among: Sequence[Axis] = AXES
) -> Recipe:
    """The recipe of a candidate: pruning stages with these settings, healing, and the recipe's other stages.

    healing_steps: training steps of each healing. Other settings of a stage are those of the user's recipe.
    """
    own = {step.name: dict(step.config) for step in recipe.stages}
    pruning = [
        NamedStage(
            name=axis.stage, config={**axis.config, **own.get(axis.stage, {}), axis.setting: settings[axis.name]}
        )
        for axis in among
        if axis.name in settings
    ]
    heal_config = recipe.heal if isinstance(recipe.heal, dict) else {}
    healing = [
        NamedStage(name=HEAL, config={**heal_config, **own.get(HEAL, {}), "steps": steps}) for steps in healing_steps
    ]
    searched = {axis.stage for axis in AXES} | {HEAL}
    others = [(step, step.make_stage().kind) for step in recipe.stages if step.name not in searched]
    before = [step for step, kind in others if kind == "torch"]
    after = [step for step, kind in others if kind == "plan"]
    return recipe.model_copy(update={"stages": (*before, *pruning, *healing, *after), "heal": False})


def can_heal(recipe: Recipe) -> bool:
    """Whether candidates may be healed: the stage is registered, and the recipe does not switch it off."""
    return HEAL in registry.STAGES and (recipe.heal is not False or HEAL in {step.name for step in recipe.stages})
