"""What a search may vary, as data; and what a choice makes of a model's layers, foreseen without touching the model.

To add an axis: one entry of AXES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compress.search.layer_spec import Cell
from laconic import registry
from laconic.recipes.recipe import HEAL, NamedStage, Recipe

Settings = Mapping[str, float]
"""A value for each axis that is not left alone, by the axis's name."""

Cells = tuple[Cell, ...]
WHOLE = 1.0
MULTIPLE = 8
"""What widths are foreseen in multiples of."""


@dataclass(frozen=True)
class Axis:
    """One thing that there may be more or less of.

    stage, setting: as a recipe names them. values: of the setting, from nearly nothing taken to the most; WHOLE, which
    leaves the stage out, is understood. applies: whether a model of these layers has what the stage works on. foresee:
    the layers that a value leaves of these, about. config: other settings of the stage that a search is best done
    with. first: whether a search begins with it; blocks are a coarse measure, and factors make two layers of one, which
    seldom pays by itself.
    """

    name: str
    stage: str
    setting: str
    values: tuple[float, ...]
    applies: Callable[[Cells], bool]
    foresee: Callable[[Cells, float], Cells]
    config: Mapping[str, object] = field(default_factory=dict)
    first: bool = True


def has(*wanted: str) -> Callable[[Cells], bool]:
    """Whether some layer has one of these roles."""
    return lambda cells: any(cell.role in wanted for cell in cells)


def blocks(cells: Cells) -> bool:
    """Whether there is more than one block."""
    return len({cell.block for cell in cells if cell.block is not None}) > 1


def matrices(cells: Cells) -> bool:
    """Whether there are layers with weights that low-rank factors could be smaller than."""
    return any(cell.weight and min(cell.width) >= 2 * MULTIPLE for cell in cells)


def fewer_blocks(cells: Cells, keep: float) -> Cells:
    """Blocks kept: so much of each."""
    return tuple(cell if cell.block is None else replace(cell, count=cell.count * keep) for cell in cells)


def narrower(makes: str, takes: str) -> Callable[[Cells, float], Cells]:
    """Units kept between the layers that make them and those that take them."""

    def foresee(cells: Cells, keep: float) -> Cells:
        def change(cell: Cell) -> Cell:
            inputs, outputs = cell.width
            if cell.role == makes:
                return cell.resized(inputs, rounded(outputs * keep))
            return cell.resized(rounded(inputs * keep), outputs) if cell.role == takes else cell

        return tuple(change(cell) for cell in cells)

    return foresee


def fewer_heads(cells: Cells, keep: float) -> Cells:
    """Heads kept: in what makes and takes them, and in the attention between."""
    found = narrower("queries", "attended")(cells, keep)
    return tuple(cell.with_heads(keep) if cell.kind == "attention" else cell for cell in found)


def fewer_channels(cells: Cells, keep: float) -> Cells:
    """Channels kept everywhere but at the model's input and its output."""
    found = []
    for number, cell in enumerate(cells):
        inputs, outputs = cell.width
        first, last = number == 0, number == len(cells) - 1
        if cell.role == "channels" or last:
            cell = cell.resized(
                inputs if first else rounded(inputs * keep), outputs if last else rounded(outputs * keep)
            )
        found.append(cell)
    return tuple(found)


def factors(cells: Cells, keep: float) -> Cells:
    """Each layer as two, with so much of its weights together."""
    found: list[Cell] = []
    for cell in cells:
        if not cell.weight:
            found.append(cell)
            continue
        rank = rounded(
            keep * cell.parameters / cell.count / (cell.weight[0] + cell.parameters / cell.count / cell.weight[0])
        )
        inputs, outputs = cell.width
        if cell.groups > 1 or rank >= min(inputs, outputs) or min(inputs, outputs) < 2 * MULTIPLE:
            found.append(cell)
            continue
        found.append(cell.resized(inputs, rank))
        ones = tuple(1 for _ in cell.weight[2:])
        shape = (cell.shape[0], rank, *after(cell)) if cell.kind == "conv" else (*cell.shape[:-1], rank)
        found.append(
            replace(
                cell,
                shape=shape,
                weight=(outputs, rank, *ones),
                stride=ones,
                padding=tuple(0 for _ in ones),
                dilation=ones,
            )
        )
    return tuple(found)


def after(cell: Cell) -> tuple[int, ...]:
    """The height and width, or length, that a convolution leaves."""
    parts = zip(cell.shape[2:], cell.weight[2:], cell.stride, cell.padding, cell.dilation, strict=True)
    return tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in parts
    )


def rounded(width: float) -> int:
    """Up to a multiple, as the stages do it."""
    return max(MULTIPLE * -(-round(width) // MULTIPLE), MULTIPLE)


HEADS = (0.84, 0.75, 0.67, 0.5, 0.34)
WIDTHS = (0.84, 0.75, 0.67, 0.5, 0.375, 0.25)
RANKS = (0.75, 0.5, 0.375, 0.25)
BLOCKS = (0.84, 0.67, 0.5, 0.34)

AXES = (
    Axis("layers", "prune.layers", "keep", BLOCKS, blocks, fewer_blocks, first=False),
    Axis("heads", "prune.heads", "keep", HEADS, has("attended"), fewer_heads),
    Axis("ffn", "prune.ffn", "keep", WIDTHS, has("up"), narrower("up", "down")),
    Axis("channels", "prune.channels", "keep", WIDTHS, has("channels"), fewer_channels),
    Axis("rank", "factorize.low-rank", "keep", RANKS, matrices, factors, first=False),
)
"""In the order in which their stages run."""


def axes(cells: Cells) -> tuple[Axis, ...]:
    """Those that a model of these layers has something for, and whose stage is there."""
    return tuple(axis for axis in AXES if axis.stage in registry.STAGES and axis.applies(cells))


def foreseen(cells: Cells, settings: Settings, among: Sequence[Axis] = AXES) -> Cells:
    """The layers that these settings leave, about: as if each stage cut everywhere alike."""
    for axis in among:
        if axis.name in settings:
            cells = axis.foresee(cells, settings[axis.name])
    return cells


def with_settings(recipe: Recipe, settings: Settings, heals: Sequence[int], among: Sequence[Axis] = AXES) -> Recipe:
    """The recipe that does this: the cuts, healing of so many steps each, and what else the recipe does.

    Other settings of a stage that the recipe names itself are the recipe's.
    """
    own = {step.name: dict(step.config) for step in recipe.stages}
    cuts = [
        NamedStage(
            name=axis.stage, config={**axis.config, **own.get(axis.stage, {}), axis.setting: settings[axis.name]}
        )
        for axis in among
        if axis.name in settings
    ]
    gentle = recipe.heal if isinstance(recipe.heal, dict) else {}
    healing = [NamedStage(name=HEAL, config={**gentle, **own.get(HEAL, {}), "steps": steps}) for steps in heals]
    searched = {axis.stage for axis in AXES} | {HEAL}
    others = [(step, step.make_stage().kind) for step in recipe.stages if step.name not in searched]
    before = [step for step, kind in others if kind == "torch"]
    behind = [step for step, kind in others if kind == "plan"]
    return recipe.model_copy(update={"stages": (*before, *cuts, *healing, *behind), "heal": False})


def heals(recipe: Recipe) -> bool:
    """Whether a search for this recipe may heal: the stage is there, and the recipe does not refuse it."""
    return HEAL in registry.STAGES and (recipe.heal is not False or HEAL in {step.name for step in recipe.stages})
