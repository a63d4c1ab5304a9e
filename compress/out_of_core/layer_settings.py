"""How a stage of a recipe rounds the layers of a model that is quantized a layer at a time."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from compress.quantize.awq import Awq
from compress.quantize.plan_rounding import RoundingConfig
from compress.quantize.weight_only import Gptq, Weights, make_config
from laconic.errors import RecipeError
from laconic.models.layer_patterns import match_patterns
from laconic.quantization.plan import BITS, Precision
from laconic.recipes.recipe import Recipe


@dataclass(frozen=True)
class LayerSettings:
    """precision: of the weights of linear modules within layers. samples: texts to calibrate with. keep: modules, by
    path or pattern, that stay as they are. scales_inputs: whether inputs with large activations are scaled up (AWQ)."""

    precision: Precision
    config: RoundingConfig
    samples: int
    keep: tuple[str, ...]
    scales_inputs: bool = False

    @classmethod
    def read(cls, recipe: Recipe) -> "LayerSettings":
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
            return cls("int4-weight", config, stage.samples, stage.keep, scales_inputs=True)
        config = make_config(stage, "gptq" if isinstance(stage, Gptq) else stage.rounding)
        if isinstance(stage, Gptq):
            config = replace(config, act_order=stage.act_order)
        precision: Precision = "int4-weight" if stage.bits == 4 else "int8-weight"
        return cls(precision, config, stage.samples, stage.keep)

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return BITS[self.precision]

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None for all of them."""
        return self.config.find_group_size(self.precision)

    def select(self, paths: Collection[str]) -> list[str]:
        """Select the modules that are rounded. Raises RecipeError for a pattern of `keep` that matches none."""
        kept = match_patterns(paths, self.keep, "keep")
        return [path for path in paths if path not in kept]
