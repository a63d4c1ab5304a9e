"""Placements for the engines that lost the race here, which another processor may run faster."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from export.candidates.candidate import EngineCandidate, choose_fastest
from laconic.arrays import Arrays
from laconic.artifacts.placement import Placement
from laconic.artifacts.verdict import Verdict
from laconic.artifacts.writer import PlacedModel
from laconic.progress import Steps
from laconic.quantization.graph import Graph

Validate = Callable[[EngineCandidate], tuple[Verdict, list[tuple[Arrays, Arrays]]]]


def place_alternatives(
    candidates: Sequence[EngineCandidate],
    chosen: EngineCandidate,
    graph: Graph,
    validate: Validate,
    folder: Path,
    steps: Steps,
) -> Iterator[PlacedModel]:
    """Yield, for each other engine, its fastest candidate that meets the goal, built, and validated by itself.

    One that fails its validation, or that no candidate of its engine stands for, is left out with a warning. validate:
    derives a verdict and golden pairs. folder: for the built graphs.
    """
    for runtime in dict.fromkeys(each.option.runtime for each in candidates):
        if runtime == chosen.option.runtime:
            continue
        meeting = [each for each in candidates if each.option.runtime == runtime and each.met and not each.is_plain]
        if not meeting:
            steps.warn(f"no graph for {runtime} meets the goal: the artifact is not placed for it")
            continue
        best = choose_fastest(meeting)
        with steps.step(f"validate for {runtime}") as step:
            verdict, golden = validate(best)
            step.note = verdict.describe()
        if verdict.state == "failed":
            steps.warn(f"{best.name} failed its validation: the artifact is not placed for it")
            continue
        model = folder / runtime / f"model.{runtime}.onnx"
        model.parent.mkdir(parents=True)
        best.option.build(graph, best.plan, model)
        placement = Placement(
            runtime=runtime,
            compute=best.option.compute,
            precision=dict(sorted(best.plan.precision.items())),
            model=model.name,
            golden=f"golden.{runtime}.safetensors",
            verdict=verdict,
            int8_kv_cache=best.plan.int8_kv_cache,
            int4_value_cache=best.plan.int4_value_cache,
        )
        yield PlacedModel(placement, model, golden)
