"""How a stage of a recipe rounds the layers of a model that is quantized a layer at a time."""

from dataclasses import replace

from compress.out_of_core.layer_settings import LayerSettings
from compress.quantize.awq import Awq
from compress.quantize.plan_rounding import RoundingConfig
from compress.quantize.weight_only import Gptq, Weights, make_config
from laconic.errors import RecipeError
from laconic.quantization.plan import Precision
from laconic.recipes.recipe import Recipe


def read_settings(recipe: Recipe) -> LayerSettings:
    """Read the settings of a recipe's only stage. Raises RecipeError for any that need the whole model."""
    (step,), (stage,) = recipe.stages, recipe.make_stages()
    if not isinstance(stage, (Weights, Gptq, Awq)) or (isinstance(stage, Weights) and stage.bits == 16):
        raise RecipeError(f"{step.name}: no checkpoint is written in FP16. Set bits: 4 or 8")
    unfit = {
        "symmetric": (not stage.symmetric, True, "transformers does not read zeros beside scales"),
        "mixed_precision": (stage.mixed_precision, False, "a trial of one layer would run the whole model"),
        "bias_correction": (getattr(stage, "bias_correction", False), False, "few layers have a bias to correct"),
    }
    for key, (is_unfit, needed, reason) in unfit.items():
        if is_unfit:
            raise RecipeError(
                f"{step.name}: for a checkpoint, {key} must be {str(needed).lower()}: {reason}. Set {key}: "
                f"{str(needed).lower()}, or write an artifact"
            )
    if isinstance(stage, Awq):
        config = RoundingConfig(group_size=stage.group_size)
        return LayerSettings("int4-weight", config, stage.samples, stage.keep, scales_inputs=True)
    config = make_config(stage, "gptq" if isinstance(stage, Gptq) else stage.rounding)
    if isinstance(stage, Gptq):
        config = replace(config, act_order=stage.act_order)
    precision: Precision = "int4-weight" if stage.bits == 4 else "int8-weight"
    return LayerSettings(precision, config, stage.samples, stage.keep)
