"""The time that measuring each layer's sensitivity takes, and whether few samples rank the layers as more do.

    python benchmarks/sensitivity.py [--samples 32] [--cache FOLDER]

all-MiniLM-L6-v2, every layer quantized alone by the default recipe's plan: with the whole graph run for each layer, and
with the graph run from that layer on, which is what `laconic compress` does. By processor time, of all threads.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from inputs import model_folder, texts
from results import Results, make_parser

from compress.quantize.sensitivity import measure_sensitivity
from compress.quantize.static import Static
from export.candidates.engine_option import SENSITIVITY_OPTION
from export.candidates.layer_trials import LayerTrials
from export.candidates.plan_evaluator import PlanEvaluator
from export.sources import capture_graph, open_source
from laconic.arrays import Array
from laconic.cache import Cache
from laconic.metrics import spearman
from laconic.progress import Steps
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import PROBE, split_samples
from laconic.recipes.stage import PlanContext
from laconic.runtimes.predict import predict

TEXTS = 600


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=32, help=f"to compare with {PROBE}")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs go")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    results = Results(publish=arguments.publish)
    data, _ = texts(arguments.cache, TEXTS)
    recipe = Recipe.parse({"source": str(model_folder(arguments.cache)), "data": str(data), "stages": []})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = Cache(folder / "kept")
        source = open_source(recipe, kept, trust=False)
        samples, graph = split_samples(recipe, source.task), capture_graph(source, kept)
        sets = {count: samples.choose.take(count, recipe.seed) for count in (arguments.samples, PROBE)}
        with source.open(1) as session:
            original = {each.fingerprint: predict(session, source.task, each) for each in sets.values()}
        context = PlanContext(
            task=source.task, key="", seed=recipe.seed, folder=folder, cache=kept, steps=Steps(), train=samples.train,
            calibrate=samples.calibrate, choose=samples.choose, trial=lambda plan: np.zeros(1),
        )  # fmt: skip
        plan = Static(mixed_precision=False).plan(graph, context).rungs[0][0]

        def measure(count: int, *, whole: bool) -> tuple[dict[str, float], float]:
            """The sensitivities and the seconds."""
            cache = Cache(folder / f"{count}-{whole}")
            evaluator = PlanEvaluator(graph, source.task, cache, folder, original)
            trial: Callable[[Plan], Array] = LayerTrials(evaluator, SENSITIVITY_OPTION, sets[count])
            if whole:

                def trial(plan: Plan) -> Array:
                    return 1 - evaluator.try_plan(plan, SENSITIVITY_OPTION, sets[count]).fidelity

            start = time.process_time()
            return measure_sensitivity(graph, plan, replace(context, trial=trial)), time.process_time() - start

        found = {(count, whole): measure(count, whole=whole) for count in sets for whole in (True, False)}
    results.table(
        "layers",
        ["samples", "whole graph, s", "from the layer on, s"],
        [[str(count), *(f"{found[count, whole][1]:.1f}" for whole in (True, False))] for count in sets],
    )
    weights = {layer.node: layer.parameters for layer in graph.layers}
    ranked = [np.array([found[count, False][0][node] / weights[node] for node in weights]) for count in sets]
    print(f"\nRank correlation of {len(weights)} layers: {spearman(*ranked):.3f}")


if __name__ == "__main__":
    main()
