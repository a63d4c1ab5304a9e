"""The legal order of stages in a recipe, and where healing is inserted, derived from what the stages declare."""

from collections.abc import Sequence

from laconic.errors import RecipeError
from laconic.recipes.stage import Property, Stage, TorchStage

PROPERTY_DESCRIPTIONS: dict[Property, str] = {
    "zeros": "weights that are zero",
    "ranges": "ranges that were learned together with the weights",
    "factors": "low-rank factors, with which a block cannot be pruned any more",
}


def check_order(names: Sequence[str], stages: Sequence[Stage], *, onnx: bool) -> None:
    """Raise RecipeError unless each stage can handle, and preserves, the properties that the stages before it made.

    Torch stages come before quantization, of which there is at most one. onnx: the source is a graph already, which
    torch stages cannot change.
    """
    planned = ""
    made: dict[Property, str] = {}
    for number, (name, stage) in enumerate(zip(names, stages, strict=True)):
        where = f"stages[{number}] ({name})"
        if stage.kind == "torch" and onnx:
            raise RecipeError(f"{where} changes a torch module, but the source is an ONNX file. Remove the stage")
        if stage.kind == "torch" and planned:
            raise RecipeError(f"{where} must come before {planned}, which needs the finished model")
        if stage.kind == "plan" and planned:
            raise RecipeError(f"{where} comes after {planned}: a model is quantized only once. Remove one of them")
        for broken in sorted(stage.breaks & made.keys()):
            instead = f"Move {name} before {made[broken]}" if stage.kind == "torch" else "Use quantize.static instead"
            raise RecipeError(
                f"{where} would destroy what {made[broken]} made: {PROPERTY_DESCRIPTIONS[broken]}. "
                f"{instead}, or remove one of them"
            )
        made |= dict.fromkeys(stage.makes, name)
        planned = name if stage.kind == "plan" else planned


def find_stages_to_heal(stages: Sequence[Stage], heal: Stage) -> list[int]:
    """Return the numbers of the stages after which `heal` is inserted: every lossy stage that is not followed by one
    that trains.

    Stages are left out where healing would destroy a property made before, such as zeros that training would fill.
    """
    numbers = []
    made: set[Property] = set()
    for number, (stage, after) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
        made |= stage.makes
        if not (isinstance(stage, TorchStage) and stage.lossy):
            continue
        if not (isinstance(after, TorchStage) and after.trains) and not heal.breaks & made:
            numbers.append(number)
    return numbers
