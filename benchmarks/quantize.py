"""What each way to round weights costs in fidelity: the figures of docs/quantize.md, measured again here.

    python benchmarks/quantize.py [--model minilm|digits] [--samples N] [--only WAY ...] [--cache FOLDER]

Every way is written for each engine in FP32, all layers at its precision, and its answers are compared with the
original's: MiniLM's on texts, the digits network's on images, that neither training nor calibration has seen.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digit_images
import numpy as np
from inputs import model_folder, texts
from results import Results, make_parser

from export.candidates.engine_option import EngineOption
from export.sources import capture_graph, open_source
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset
from laconic.models.source import Source
from laconic.progress import Steps
from laconic.recipes.recipe import NamedStage, Recipe
from laconic.recipes.splits import split_samples
from laconic.recipes.stage import PlanContext
from laconic.runtimes.predict import predict

STATIC: dict[str, Any] = {"mixed_precision": False, "bias_correction": False}
INT4: dict[str, tuple[str, dict[str, Any]]] = {
    "nearest": ("quantize.weights", {}),
    "AdaRound": ("quantize.weights", {"rounding": "adaround"}),
    "GPTQ": ("quantize.gptq", {"mixed_precision": False}),
    "GPTQ, `act_order: false`": ("quantize.gptq", {"mixed_precision": False, "act_order": False}),
}
"""Ways to round to four bits."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "INT8, nearest": ("quantize.static", STATIC),
    "INT8, bias correction": ("quantize.static", {**STATIC, "bias_correction": True}),
    "INT8, bias correction, reduced range": (
        "quantize.static",
        {**STATIC, "bias_correction": True, "reduce_range": True},
    ),
    "INT8, AdaRound": ("quantize.static", {**STATIC, "rounding": "adaround"}),
    "INT8, GPTQ": ("quantize.static", {**STATIC, "rounding": "gptq"}),
    "INT8, GPTQ, bias correction": ("quantize.static", {**STATIC, "rounding": "gptq", "bias_correction": True}),
    "weights INT8, nearest": ("quantize.weights", {"bits": 8}),
    "weights INT8, GPTQ": ("quantize.gptq", {"bits": 8, "mixed_precision": False}),
    **{
        f"weights INT4, groups of {group}, {name}": (stage, {"bits": 4, "group_size": group, **settings})
        for group in (128, 32)
        for name, (stage, settings) in INT4.items()
    },
}
ENGINES = ("onnxruntime", "openvino")
TEXTS = 2000
"""Of those that may be calibrated with."""
UNSEEN = 400
"""Texts that judge."""


def rows(
    source: Source, seen: Dataset, unseen: Dataset, cache: Cache, samples: int, only: list[str]
) -> Iterator[list[str]]:
    """A row for each way: its size, and for each engine the mean and the worst of its answers' likeness."""
    graph = capture_graph(source, cache)
    with source.open(1) as session:
        original = predict(session, source.task, unseen)
    for name in only:
        stage, settings = WAYS[name]
        settings = settings if name == "weights INT8, nearest" else {**settings, "samples": samples}
        with tempfile.TemporaryDirectory() as folder:
            context = PlanContext(
                task=source.task, key=name, seed=0, folder=Path(folder), cache=cache, steps=Steps(), train=seen,
                calibrate=seen, choose=seen, trial=lambda plan: np.zeros(1),
            )  # fmt: skip
            plan = NamedStage(name=stage, config=settings).make_stage().plan(graph, context).rungs[0][0]  # type: ignore[attr-defined]
            cells = []
            for engine in ENGINES:
                option, path = EngineOption(engine, "float32"), Path(folder) / f"{engine}.onnx"
                option.build(graph, plan, path)
                with option.open(path, 1) as session:
                    found = source.task.fidelity(original, predict(session, source.task, unseen))
                cells += [f"{found.mean():.5f}", f"{found.min():.5f}"]
            yield [name, f"{path.stat().st_size / 1e6:.2f}", *cells]


def minilm(folder: Path) -> tuple[Source, Dataset, Dataset]:
    """The model, the texts that may be looked at, and unseen ones of two kinds."""
    data, unseen = texts(folder, TEXTS)
    recipe = Recipe.parse({"source": str(model_folder(folder)), "data": str(data), "stages": []})
    source = open_source(recipe, Cache(folder / "cache"), trust=False)
    judges = make_dataset([text for kind in unseen.values() for text in kind], source.task)
    return source, split_samples(recipe, source.task).calibrate, judges.take(UNSEEN)


def network(folder: Path) -> tuple[Source, Dataset, Dataset]:
    """The network that reads digits, and images."""
    recipe = digit_images.prepared(folder)
    source = open_source(recipe, Cache(folder / "cache"), trust=False)
    samples = split_samples(recipe, source.task)
    return source, samples.calibrate, samples.judge


MODELS = {"minilm": minilm, "digits": network}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="minilm")
    parser.add_argument("--samples", type=int, default=128, help="to calibrate with")
    parser.add_argument("--only", nargs="+", default=list(WAYS), metavar="WAY", help="the ways to measure")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and results go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    source, seen, unseen = MODELS[arguments.model](arguments.cache)
    cache = Cache(arguments.cache / "cache")
    head = ["", "MB", *(f"{engine}: {figure}" for engine in ENGINES for figure in ("mean", "worst"))]
    results.begin(arguments.model, head)
    for row in rows(source, seen, unseen, cache, arguments.samples, arguments.only):
        results.add(arguments.model, row)


if __name__ == "__main__":
    main()
