"""Keys of the cache hold all that a result depends on: libraries, instructions, whole plans, the user's own code."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from models import Perceptron
from onnx import TensorProto, helper
from safetensors.torch import save_file

from compress.pipeline import compress
from export.candidates.candidate import EngineCandidate
from export.candidates.engine_option import EngineOption
from export.candidates.race import make_race_key
from export.sources import open_onnx
from laconic import hashing
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, QuantizedWeight, Range, Smoothing
from laconic.quantization.plan_file import digest_plan
from laconic.recipes.recipe import Origin, Recipe
from laconic.recipes.stage import describe_stage
from laconic.tensor import TensorSpec
from train.finetune.finetune import FinetuneInputs, make_run_key
from train.settings import TrainingRecipe


@pytest.fixture
def versions():
    """Look versions up anew, before and after."""
    hashing.library_versions.cache_clear()
    yield
    hashing.library_versions.cache_clear()


def test_another_version_of_a_library_is_another_environment_and_none_is_loaded_for_it(tmp_path, monkeypatch, versions):
    before = hashing.environment_digest(), hashing.library_digest()
    assert torch.__version__.startswith(hashing.library_versions()["torch"]), "without the CUDA of a wheel from PyPI"
    for name in ("tokenizers", "timm"):
        wheel = tmp_path / f"{name}-99.dist-info"
        wheel.mkdir()
        (wheel / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
    monkeypatch.syspath_prepend(tmp_path)
    hashing.library_versions.cache_clear()
    assert hashing.library_versions()["timm"] == hashing.library_versions()["tokenizers"] == "99"
    assert hashing.environment_digest() != before[0]
    assert hashing.library_digest() != before[1]
    loaded = set(sys.modules)
    hashing.library_versions()
    assert {name for name in set(sys.modules) - loaded if "." not in name} <= {"email"}


@pytest.mark.parametrize("variable", hashing.ARITHMETIC_VARIABLES)
def test_a_limit_on_instructions_is_another_environment(variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    before = hashing.environment_digest(), hashing.library_digest()
    monkeypatch.setenv(variable, "AVX2")
    assert hashing.environment_digest() != before[0]
    assert hashing.library_digest() != before[1]
    monkeypatch.setenv(variable, "SSE41")
    assert len({hashing.environment_digest(), before[0]}) == 2
    monkeypatch.setenv(variable, "")
    assert (hashing.environment_digest(), hashing.library_digest()) == before, "an empty variable limits nothing"


@pytest.mark.sweep
def test_a_run_under_a_limit_on_instructions_takes_nothing_from_the_cache(trained, tmp_path, monkeypatch):
    weights, data = trained
    samples = {"calibrate": str(data), "limit": 150}
    recipe = Recipe.parse(
        {"source": str(weights), "builder": "digits:DigitsNet", "data": samples, "runtimes": ["onnxruntime"]}
        | {"stages": [{"prune.unstructured": {"sparsity": 0.1}}, {"quantize.static": {"samples": 16}}]}
        | {"heal": {"steps": 4, "eval_every": 4, "loader": {"workers": 0}}}
    )
    found = []
    for mode in ("", "COMPATIBLE"):
        monkeypatch.setenv("MKL_CBWR", mode)
        before = {path.name for path in (tmp_path / "cache").glob("*")}
        compress(recipe, tmp_path / "made.laconic", cache=Cache(tmp_path / "cache"), steps=Steps(quiet=True))
        new = {path.name for path in (tmp_path / "cache").glob("*")} - before
        found.append(sorted(name.rpartition("-")[0] for name in new))
    assert found[0] == found[1]
    assert {"answers", "graph", "calibrated", "trial", "stage", "error"} <= set(found[0])


def plan(**changes):
    """A plan with one of everything."""
    weight = QuantizedWeight(np.ones((2, 2), np.int8), np.ones((1, 2), np.float32), np.zeros(2, np.float32), 16)
    whole = Plan(
        {"layer": "int8", "other": "float32"},
        {"x": Range(-1, 1)},
        {"x": Smoothing(np.ones(2, np.float32), Range(-2, 2))},
        {("layer", "int8"): weight},
    )
    return replace(whole, **changes)


OTHER_PLANS = {
    "precision": plan(precision={"layer": "int8-dynamic", "other": "float32"}),
    "ranges": plan(ranges={"x": Range(-1, 2)}),
    "factors": plan(smoothing={"x": Smoothing(np.full(2, 2, np.float32), Range(-2, 2))}),
    "limits": plan(smoothing={"x": Smoothing(np.ones(2, np.float32), Range(-3, 2))}),
    "weights": plan(weights={}),
    "groups": plan(
        weights={("layer", "int8"): QuantizedWeight(np.ones((2, 2), np.int8), np.ones((1, 2), np.float32), None, 32)}
    ),
    "attention": plan(attention=False),
}


@pytest.mark.parametrize("part", OTHER_PLANS)
def test_the_key_of_a_plan_is_of_the_whole_plan(part):
    assert digest_plan(plan()) == digest_plan(plan())
    assert digest_plan(OTHER_PLANS[part]) != digest_plan(plan())


def test_arrays_of_the_same_bytes_in_another_shape_or_dtype_have_another_digest():
    array = np.zeros(4, np.int32)
    digests = {hashing.digest_arrays({"x": each}) for each in (array, array.reshape(2, 2), array.view(np.float32))}
    assert len(digests) == 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    weights = tmp_path_factory.mktemp("net") / "net.safetensors"
    save_file(Perceptron([6, 8, 3]).state_dict(), weights)
    return CheckpointSource.of(load_source(weights, builder="models:Perceptron", arguments={"widths": [6, 8, 3]}))


@pytest.mark.parametrize("part", [*OTHER_PLANS, "engine"])
def test_a_race_is_run_again_for_any_other_plan_or_engine(part, source, tmp_path):
    def key(plan, option):
        candidate = EngineCandidate(option, plan, tmp_path / "model.onnx", np.ones(1), met=True)
        return make_race_key([candidate], source, Graph(tmp_path / "graph.onnx", (), (), (), "graph"))

    option = EngineOption("onnxruntime", "float32")
    other = replace(option, overflow=frozenset({"x"})) if part == "engine" else option
    assert key(plan(), option) == key(plan(), option)
    assert key(OTHER_PLANS.get(part, plan()), other) != key(plan(), option)


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) {change}
"""


def test_a_module_or_a_stage_of_the_users_own_with_other_code_is_another_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    save_file({"layer.weight": torch.ones(3, 6), "layer.bias": torch.ones(3)}, tmp_path / "net.safetensors")
    inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 6)),)
    keys = []
    for change in ("", "", "* 2"):
        (tmp_path / "own_net.py").write_text(NET.format(change=change))
        sys.modules.pop("own_net", None)
        importlib.invalidate_caches()
        checkpoint = load_source(tmp_path / "net.safetensors", builder="own_net:Net", inputs=inputs)
        keys.append((checkpoint.key, CheckpointSource.of(checkpoint).key))
    sys.modules.pop("own_net", None)
    assert keys[0] == keys[1] != keys[2]
    assert keys[0][0] == keys[2][0], "a saved checkpoint is the same, whatever became of the code"
    monkeypatch.syspath_prepend(tmp_path)
    code = "from laconic.recipes.stage import Stage\nclass Own(Stage):\n    kind = 'plan'\n    method: str\n"
    described = []
    for change in ("", "", "# other"):
        (tmp_path / "own_stage.py").write_text(code + change)
        sys.modules.pop("own_stage", None)
        importlib.invalidate_caches()
        stage = importlib.import_module("own_stage").Own.model_construct(method="own_stage:Criterion")
        described.append(describe_stage("own_stage:Own", stage))
    sys.modules.pop("own_stage", None)
    assert described[0] == described[1] != described[2]
    assert hashing.digest_own_code(["laconic.cache", "torch.nn", "json", "not.there", "sys"]) == []


def test_an_onnx_file_with_other_external_data_is_another_source(tmp_path):
    path = tmp_path / "net.onnx"
    weight = helper.make_tensor("w", TensorProto.FLOAT, [6, 3], np.ones((6, 3), np.float32).tobytes(), raw=True)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    first = open_onnx(path, Origin(source=str(path)), None, Cache(tmp_path / "cache"))
    (tmp_path / "net.data").write_bytes(np.full((6, 3), 2, np.float32).tobytes())
    assert open_onnx(path, Origin(source=str(path)), None, Cache(tmp_path / "cache")).key != first.key


@pytest.mark.parametrize(("best_by", "is_same"), [(None, True), ("loss", False)])
def test_a_run_that_is_judged_by_other_samples_is_another_run(best_by, is_same, source, tmp_path):
    task, recipe = source.task, TrainingRecipe(source="s", data={"train": "d"}, best_by=best_by)
    one, other = (make_dataset(task.examples(4, seed=seed), task, name="rows") for seed in (1, 2))
    inputs = FinetuneInputs(source.checkpoint, None, one, one, None, 1)
    assert (make_run_key(inputs, recipe) == make_run_key(replace(inputs, validation=other), recipe)) == is_same
    assert make_run_key(inputs, recipe) != make_run_key(replace(inputs, train=other), recipe)
