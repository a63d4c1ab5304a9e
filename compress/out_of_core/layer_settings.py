"""How the layers of a model are rounded that is quantized a layer at a time."""

from collections.abc import Collection
from dataclasses import dataclass

from compress.quantize.plan_rounding import RoundingConfig
from laconic.models.layer_patterns import match_patterns
from laconic.quantization.plan import BITS, Precision


@dataclass(frozen=True)
class LayerSettings:
    """precision: of the weights of linear modules within layers. samples: texts to calibrate with. keep: modules, by
    path or pattern, that stay as they are. scales_inputs: whether inputs with large activations are scaled up (AWQ)."""

    precision: Precision
    config: RoundingConfig
    samples: int
    keep: tuple[str, ...]
    scales_inputs: bool = False

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
