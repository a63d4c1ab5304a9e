"""What may follow what in a recipe, and where healing goes: from what the stages say of themselves, before any runs."""

from collections.abc import Sequence

from laconic.errors import RecipeError
from laconic.recipes.stage import Property, Stage, TorchStage

PROPERTY_DESCRIPTIONS: dict[Property, str] = {
    "zeros": "weights that are zero",
    "ranges": "ranges that were learned together with the weights",
    "factors": "layers in factors, between which no block can be cut",
}


def check_order(names: Sequence[str], stages: Sequence[Stage], *, onnx: bool) -> None:
    """Raise RecipeError unless each stage can work on what those before it leave, and leaves in place what they made.

    Every torch stage comes before quantization, which is done at most once. onnx: the source is a graph already, so no
    torch stage can work on it.
    """
    planned = ""
    made: dict[Property, str] = {}
    for number, (name, stage) in enumerate(zip(names, stages, strict=True)):
        where = f"stages[{number}] ({name})"
        if stage.kind == "torch" and onnx:
            raise RecipeError(f"{where} changes a torch module, and the source is an ONNX file. Remove the stage")
        if stage.kind == "torch" and planned:
            raise RecipeError(f"{where} must come before {planned}, which needs the finished model")
        if stage.kind == "plan" and planned:
            raise RecipeError(f"{where} comes after {planned}: a model is quantized once. Remove one of them")
        for broken in sorted(stage.breaks & made.keys()):
            instead = f"Move {name} before {made[broken]}" if stage.kind == "torch" else "Take quantize.static"
            raise RecipeError(
                f"{where} breaks what {made[broken]} before it made: {PROPERTY_DESCRIPTIONS[broken]}. "
                f"{instead}, or remove one of them"
            )
        made |= dict.fromkeys(stage.makes, name)
        planned = name if stage.kind == "plan" else planned


def find_stages_to_heal(stages: Sequence[Stage], heal: Stage) -> list[int]:
    """After which of the stages `heal` belongs: each lossy one, where none that trains comes next.

    Left out are those where it would break what was made before, as zeros that training fills.
    """
    found = []
    made: set[Property] = set()
    for number, (stage, after) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
        made |= stage.makes
        if not (isinstance(stage, TorchStage) and stage.lossy):
            continue
        if not (isinstance(after, TorchStage) and after.trains) and not heal.breaks & made:
            found.append(number)
    return found
