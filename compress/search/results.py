"""The results of a search's steps: the prediction, the trial and the artifact of a candidate."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from compress.search.constraints import Quality
from compress.search.layer_spec import LayerSpec
from laconic.quantization.plan import Precision
from laconic.runtimes.runtime import Compute


@dataclass(frozen=True)
class CostPrediction:
    """latency: seconds for one sample. speedup: over the original. size: bytes."""

    latency: float
    speedup: float
    size: float


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial.

    quality: on the samples used for selection. specs: the layers that are left. size: bytes of their weights in INT8.
    error: why there is no result, in a sentence.
    """

    quality: Quality | None = None
    specs: tuple[LayerSpec, ...] = ()
    size: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class BuiltArtifact:
    """An artifact in the cache, with its measurements.

    folder: where it is. recipe: what it was made by, as JSON. runtime: the engine. compute: the arithmetic of layers
    that are not quantized. precision: of most layers. quality: on the samples used for selection. latency: seconds for
    one sample. size: bytes. speedup: over the original, at the batch sizes of a trial. costs: processor seconds of a
    run, by batch size. failures: the misses of the goal, also by its verdict on the test samples. doubts: what the goal
    asks for and these samples leave in doubt.
    """

    folder: str
    recipe: str
    runtime: str
    compute: Compute
    precision: Precision
    quality: Quality
    latency: float
    size: float
    speedup: float
    costs: Mapping[int, float]
    failures: tuple[str, ...]
    doubts: tuple[str, ...] = ()


OUTCOME = TypeAdapter(TrialOutcome)
BUILT = TypeAdapter(BuiltArtifact)
