"""Weights in 4 bits of which some have 8: matrices whose rounding costs most divergence per byte, beside random ones.

    python benchmarks/mixed_precision.py CHECKPOINT texts.jsonl [--share 0.5] [--group-size 32] [--limit 24]

The recipe's ladder is searched for the first plan whose divergence on the samples to choose by is small enough, as
`laconic compress` does for a goal. That plan, all in 4 bits, all in 8, and null answers, random matrices of the same
bytes, are measured on the samples to judge by, which chose nothing: the divergence of the next token's distributions
over groups of tokens, along what the original writes. FP32 arithmetic, in OpenVINO.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from results import Results, make_parser

from export.candidates.plan_evaluator import PlanEvaluator
from export.candidates.plan_search import PlanTrial, find_plan
from export.lineage import open_lineage
from export.pipeline import EngineBuild
from laconic.cache import Cache
from laconic.files import folder_size
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.tasks.tolerance import Tolerance


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument(
        "--share", type=float, default=0.5, help="the goal, as a share of the divergence of all in 4 bits"
    )
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--zeros", action="store_true", help="groups in 4 bits have zeros")
    parser.add_argument("--limit", type=int, default=None, help="most samples to choose by, and to judge by")
    parser.add_argument("--nulls", type=int, default=3, help="random choices")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where results go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    stage = {"bits": 4, "group_size": arguments.group_size, "symmetric": not arguments.zeros, "mixed_precision": True}
    recipe = Recipe.parse(
        {
            "source": str(arguments.checkpoint),
            "data": {"calibrate": str(arguments.data), "limit": arguments.limit},
            "stages": [{"quantize.weights": stage}],
            "engine_only": "openvino",
            "goal": {"fidelity": 0.5},
        }
    )
    with (
        tempfile.TemporaryDirectory() as name,
        open_lineage(recipe, Path(name) / "artifact", Steps(), Cache(arguments.cache), trust=False) as lineage,
    ):
        measure(EngineBuild(lineage), arguments.share, arguments.nulls, results)


def measure(build: EngineBuild, share: float, nulls: int, results: Results) -> None:
    """Measure the plans of a recipe, and print them."""
    graph, *_ = build.capture()
    evaluator = PlanEvaluator(graph, build.task, build.cache, build.folder, build.compute_references())
    (option,) = build.list_options(graph)
    ladder = build.plan(build.list_plan_stages(), graph, evaluator, option)
    rung, samples = ladder.rungs[0], build.samples

    def try_plan(plan: Plan) -> PlanTrial:
        return evaluator.try_plan(plan, option, samples.choose)

    limit = share * try_plan(rung[0]).divergence
    goal = Tolerance(mean=0.0, slack=0.0, max_divergence=limit)
    mixed, trial, _ = find_plan(replace(ladder, rungs=(rung,)), try_plan, goal)
    print(f"{len(samples.judge)} samples judge, {len(samples.choose)} chose: ", end="")
    print(f"{trial.divergence:.5f} nats, at most {limit:.5f} asked for\n")
    plans = {"4 bits": rung[0], "mixed": mixed, "8 bits": rung[-1]}
    plans |= {f"null {number}": plan for number, plan in enumerate(draw_plans(graph, rung[0], mixed, rung[-1], nulls))}
    results.begin("plans", ["", "matrices in 8 bits", "MB", "divergence, nats", "fidelity"])
    for name, plan in plans.items():
        folder = build.folder / name
        folder.mkdir()
        option.build(graph, plan, folder / "model.onnx")
        trial = evaluator.try_plan(plan, option, samples.judge)
        cells = [name, str(len(list_raised(rung[0], plan))), f"{folder_size(folder) / 1e6:.1f}"]
        results.add("plans", [*cells, f"{trial.divergence:.5f}", f"{trial.fidelity.mean():.4f}"])


def list_raised(lowest: Plan, plan: Plan) -> list[str]:
    """List the layers that have more bits in a plan than in the lowest one."""
    return [node for node, precision in plan.precision.items() if precision != lowest.precision[node]]


def draw_plans(graph: Graph, lowest: Plan, mixed: Plan, highest: Plan, count: int) -> Iterator[Plan]:
    """Draw plans that raise random matrices, of as many bytes as a mixed plan does, but for less than the least."""
    weights: Mapping[str, int] = {layer.node: layer.parameters for layer in graph.layers}
    total = sum(weights[node] for node in list_raised(lowest, mixed))
    for seed in range(count):
        raised, left = {}, total
        for node in np.random.default_rng(seed).permutation(list_raised(lowest, highest)).tolist():
            if weights[node] <= left:
                raised[node], left = highest.precision[node], left - weights[node]
        yield replace(lowest, precision={**lowest.precision, **raised})


if __name__ == "__main__":
    main()
