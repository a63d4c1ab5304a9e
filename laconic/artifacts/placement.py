"""A placement: an artifact's graph as one engine runs it best, with outputs and a verdict of its own."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, field_validator

from laconic import registry
from laconic.artifacts.verdict import Verdict
from laconic.errors import did_you_mean
from laconic.quantization.plan import name_cache
from laconic.runtimes.runtime import Compute

MARGIN = 1.05
"""How much faster another placement must be than the preferred one to be opened in its stead."""


class Placement(BaseModel):
    """The graph for one engine.

    runtime: the engine that Q/DQ nodes are placed for. compute: the arithmetic of the layers that are not quantized.
    precision: of weights and activations, by layer. model, golden: names of files of the artifact. verdict: of this
    graph in this engine; None if it was not validated. int8_kv_cache: whether keys and values are kept in 8 bits;
    int4_value_cache: and of these the values in 4.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str
    compute: Compute
    precision: dict[str, str]
    model: str
    golden: str
    verdict: Verdict | None
    int8_kv_cache: bool = False
    int4_value_cache: bool = False

    @field_validator("runtime")
    @classmethod
    def _registered(cls, name: str) -> str:
        if name not in registry.TABLES["runtime"]:
            raise ValueError(f"unknown runtime {name!r}. {did_you_mean(name, registry.TABLES['runtime'])}")
        return name

    @property
    def arithmetic(self) -> str:
        """The arithmetic that layers are computed in where their precision does not say it, for people to read."""
        compute = "INT8 activations" if self.compute == "int8-dynamic" else f"{self.compute} where not quantized"
        cache = name_cache(self.int8_kv_cache, self.int4_value_cache)
        return f"{compute}, {cache}" if cache else compute


def find_fastest_placement(speeds: Mapping[str, float]) -> str:
    """Find the name of the fastest placement; another than the first must be faster by MARGIN."""
    first, *others = speeds
    best = first
    for name in others:
        if speeds[name] > speeds[best] * (MARGIN if best == first else 1.0):
            best = name
    return best
