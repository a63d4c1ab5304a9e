"""Search space: the axes that a search varies, the layers that a setting leaves, predicted from their specs, and the
study that proposes settings.

To add an axis: one entry of AXES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import optuna

from compress.search.layer_spec import LayerSpec
from laconic import registry
from laconic.hashing import hash_of
from laconic.recipes.recipe import HEAL, NamedStage, Recipe

Settings = Mapping[str, float]
"""Values by axis name, for the axes that are not left as they are."""

LayerSpecs = tuple[LayerSpec, ...]
MULTIPLE = 8
"""Predicted widths are multiples of it."""

INITIAL_SHARES = (1 / 2, 1 / 4, 3 / 4, 1)
"""How far along their axes the first settings are, on all axes together."""

STARTUP_TRIALS = 8
"""Trials drawn at random before the estimator takes over."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Axis:
    """One axis of the search space: a setting of a stage.

    stage, setting: their names in a recipe. values: of the setting, from the mildest to the strongest; the stage may
    also be left out. applies: whether a model with these layers has something for the stage.
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


def has_role(role: str) -> Callable[[LayerSpecs], bool]:
    """Make a predicate: whether some layer has this role."""
    return lambda specs: any(spec.role == role for spec in specs)


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
    """Make a prediction that keeps a share of the units between layers of two roles, which produce and consume them."""

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
    projections = keep_units("qkv", "attention-output")(specs, keep)
    return tuple(spec.keep_heads(keep) if spec.kind == "attention" else spec for spec in projections)


def keep_channels(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Keep a share of the channels everywhere except at the model's input and output."""
    last = len(specs) - 1

    def change(number: int, spec: LayerSpec) -> LayerSpec:
        if spec.role != "channels" and number != last:
            return spec
        inputs, outputs = spec.width
        kept_inputs = round_width(inputs * keep) if number else inputs
        return spec.resize(kept_inputs, outputs if number == last else round_width(outputs * keep))

    return tuple(change(number, spec) for number, spec in enumerate(specs))


def factorize(specs: LayerSpecs, keep: float) -> LayerSpecs:
    """Replace each layer by two low-rank factors, which together have a share of its weights."""
    return tuple(factor for spec in specs for factor in factorize_layer(spec, keep))


def factorize_layer(spec: LayerSpec, keep: float) -> LayerSpecs:
    """Replace a layer by two low-rank factors, unless these would not be smaller."""
    inputs, outputs = spec.width
    if not spec.weight or spec.groups > 1 or min(inputs, outputs) < 2 * MULTIPLE:
        return (spec,)
    parameters = spec.parameters / spec.count
    rank = round_width(keep * parameters / (spec.weight[0] + parameters / spec.weight[0]))
    if rank >= min(inputs, outputs):
        return (spec,)
    ones = (1,) * len(spec.weight[2:])
    shape = (spec.shape[0], rank, *output_size(spec)) if spec.kind == "conv" else (*spec.shape[:-1], rank)
    second = replace(
        spec,
        shape=shape,
        weight=(outputs, rank, *ones),
        stride=ones,
        padding=(0,) * len(ones),
        dilation=ones,
    )
    return spec.resize(inputs, rank), second


def output_size(spec: LayerSpec) -> tuple[int, ...]:
    """Return the height and width, or length, of a convolution's output."""
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
    """Describe settings for people: `heads 0.5, ffn 0.25`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items()) or "nothing cut"


def find_axes(specs: LayerSpecs) -> tuple[Axis, ...]:
    """Find the axes that apply to a model with these layers, and whose stage is registered."""
    return tuple(axis for axis in AXES if axis.stage in registry.STAGES and axis.applies(specs))


def predict_specs(specs: LayerSpecs, settings: Settings) -> LayerSpecs:
    """Predict the layers that remain with these settings, as if each stage pruned all layers by the same share."""
    for axis in AXES:
        if axis.name in settings:
            specs = axis.predict(specs, settings[axis.name])
    return specs


def apply_settings(recipe: Recipe, settings: Settings, healing_steps: Sequence[int]) -> Recipe:
    """Make the recipe of a candidate: pruning stages with these settings, healing, and the recipe's other stages.

    healing_steps: training steps of each healing. Other settings of a stage are those of the user's recipe.
    """
    configs = {step.name: dict(step.config) for step in recipe.stages}
    pruning = [
        NamedStage(
            name=axis.stage, config={**axis.config, **configs.get(axis.stage, {}), axis.setting: settings[axis.name]}
        )
        for axis in AXES
        if axis.name in settings
    ]
    heal_config = {**(recipe.heal if isinstance(recipe.heal, dict) else {}), **configs.get(HEAL, {})}
    healing = [NamedStage(name=HEAL, config={**heal_config, "steps": steps}) for steps in healing_steps]
    searched = {axis.stage for axis in AXES} | {HEAL}
    others = [(step, step.make_stage().kind) for step in recipe.stages if step.name not in searched]
    before = [step for step, kind in others if kind == "torch"]
    after = [step for step, kind in others if kind == "plan"]
    return recipe.model_copy(update={"stages": (*before, *pruning, *healing, *after), "heal": False})


def can_heal(recipe: Recipe) -> bool:
    """Whether candidates may be healed: the stage is registered, and the recipe does not switch it off."""
    return HEAL in registry.STAGES and (recipe.heal is not False or HEAL in {step.name for step in recipe.stages})


class Study:
    """A multi-objective Optuna study with an ask-and-tell interface and reproducible questions.

    Bergstra et al., Algorithms for Hyper-Parameter Optimization (2011); Ozaki et al., Multiobjective Tree-Structured
    Parzen Estimator (2022). Each question has a seed of its own, so the settings depend on the results so far and on
    nothing else: a resumed search that is given the same (cached) results proposes the same settings. Optuna's pruners
    are for studies with one objective.
    """

    def __init__(self, axes: Sequence[Axis], seed: int) -> None:
        self.axes = tuple(axes)
        self.seed = seed
        self._study = optuna.create_study(directions=["minimize", "minimize"])
        self._asked = 0
        for share in INITIAL_SHARES:
            self._study.enqueue_trial({axis.name: axis.first * round(share * len(axis.values)) for axis in self.axes})

    def ask(self) -> tuple[int, dict[str, float]]:
        """Return a trial's number, and its settings: a value for each axis that is not left as it is."""
        seed = int(hash_of(self.seed, self._asked), 16) % 2**31
        self._asked += 1
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        trial = self._study.ask()
        choices = [(axis, trial.suggest_int(axis.name, 0, len(axis.values))) for axis in self.axes]
        return trial.number, {axis.name: axis.values[choice - 1] for axis, choice in choices if choice}

    def tell(self, number: int, objectives: tuple[float, float] | None) -> None:
        """Record infidelity and relative time of a trial; None for settings that failed or were rejected."""
        state = optuna.trial.TrialState.COMPLETE if objectives else optuna.trial.TrialState.FAIL
        self._study.tell(number, objectives, state)
