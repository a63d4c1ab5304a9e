import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from laconic import registry
from laconic.config import Strict
from laconic.errors import MissingPackage, RecipeError
from laconic.recipes.goal import Goal
from laconic.recipes.recipe import Data, NamedStage, Recipe, make_json_schema
from laconic.recipes.stage import Stage
from laconic.tensor import TensorSpec
from train.settings import Training


class Prune(Stage):
    kind = "torch"
    keep: float = 0.5


class Quantize(Stage):
    kind = "plan"
    method: str = "minmax"


@pytest.fixture(autouse=True)
def two_stages(monkeypatch):
    """Two stages that need no torch."""
    monkeypatch.setitem(registry.STAGES, "prune.some", f"{__name__}:Prune")
    monkeypatch.setitem(registry.STAGES, "quantize.static", f"{__name__}:Quantize")


def load(folder, text, **given):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return Recipe.load(path, **given)


EXAMPLE = """
source: ./all-MiniLM-L6-v2
task: text-embedding
data: {calibrate: texts.jsonl, evaluate: pairs.jsonl}
stages:
  - prune.some: {keep: 0.75}
  - quantize.static
target: cpu
runtimes: [onnxruntime]
goal: {fidelity: 0.999, max_drop: 1%, max_latency: 3 ms, max_size: 25 MB}
"""


def test_a_recipe_reads(tmp_path):
    recipe = load(tmp_path, EXAMPLE)
    assert recipe.source == str(tmp_path / "all-MiniLM-L6-v2")
    assert recipe.data == Data(calibrate=tmp_path / "texts.jsonl", evaluate=tmp_path / "pairs.jsonl")
    assert recipe.make_stages() == (Prune(keep=0.75), Quantize())
    assert recipe.engines == ("onnxruntime",)
    goal = recipe.goal
    assert (goal.fidelity, goal.max_drop, goal.max_latency, goal.max_size) == (0.999, 0.01, 0.003, 25_000_000)
    assert goal.worst is None


def test_the_command_line_stands_above_the_file_and_leaves_its_other_settings(tmp_path):
    recipe = load(tmp_path, EXAMPLE, source="other", target="cpu", runtimes=["openvino"])
    assert recipe.source == "other"
    assert recipe.engines == ("openvino",)
    recipe = load(tmp_path, "source: m\ndata: {evaluate: e.jsonl, limit: 96}", data="mine.csv")
    assert recipe.data == Data(calibrate=Path("mine.csv"), evaluate=tmp_path / "e.jsonl", limit=96)


def test_what_is_not_given_is_not_written_and_the_target_says_what_is_done(tmp_path):
    recipe = Recipe.default("model", task="tensors")
    assert [step.name for step in recipe.stages] == ["quantize.static"]
    assert recipe.engines == registry.TARGETS["cpu"]
    assert recipe.goal == Goal()
    assert load(tmp_path, "source: model\nstages: []").stages == ()
    assert load(tmp_path, "source: m\ndata: t.jsonl").data.calibrate == tmp_path / "t.jsonl"
    assert Recipe.default("m.onnx", stages=["quantize.static"]).make_stages() == (Quantize(),)
    assert yaml.safe_load(Recipe.default("m").to_yaml()) == {
        "source": "m",
        "stages": ["quantize.static"],
        "target": "cpu",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: m\ngaol: {}", "unknown key 'gaol'. Did you mean 'goal'?"),
        (
            "source: m\nint4_kv_cache: true",
            "unknown key 'int4_kv_cache'. Keys in 4 bits cost a small model 5 % of perplexity",
        ),
        ("source: m\ngoal: {max_dorp: 1%}", "goal: unknown key 'max_dorp'. Did you mean 'max_drop'?"),
        ("source: m\ngoal: {max_latency: 3}", "goal.max_latency: expected a time with its unit"),
        ("source: m\ngoal: 3", "goal: input should be a valid dictionary"),
        ("source: m\ndata: {calibrat: x}", "data: unknown key 'calibrat'. Did you mean 'calibrate'?"),
        ("source: m\ndata: {limit: 1}", "data.limit: input should be greater than or equal to 3, got 1"),
        ("task: tensors", "source: field required"),
        ("source: 3", "source: input should be a valid string, got 3"),
        ("source: m\ntask: text-embeding", "task: unknown task 'text-embeding'. Did you mean 'text-embedding'?"),
        ("source: m\nbuilder: package", "builder: expected 'package.module:factory', got 'package'"),
        ("source: m\ntarget: cpuu", "target: unknown target 'cpuu'. Did you mean 'cpu'?"),
        (
            "source: m\nruntimes: [openvin]",
            "runtimes: 'openvin' is not an engine of target 'cpu'. Did you mean 'openvino'?",
        ),
        ("source: m\ninputs: [{name: x, dtype: float8, shape: [1]}]", "inputs[0].dtype: unknown dtype 'float8'"),
        ("source: m\nstages: quantize.static", "stages: input should be a list"),
        ("source: m\nstages: [{a: 1, b: 2}]", "stages[0]: expected a name, or {name: {setting: value}}"),
        ("source: m\nstages: [quantize.statik]", "unknown stage 'quantize.statik'. Did you mean 'quantize.static'?"),
        (
            "source: m\nstages: [{quantize.static: {metod: x}}]",
            "quantize.static: unknown key 'metod'. Did you mean 'method'?",
        ),
        (
            "source: m\nstages: [{quantize.static: {method: 3}}]",
            "quantize.static: method: input should be a valid string",
        ),
        ("source: m\nstages: [{quantize.static: 3}]", "stages[0].config: input should be a valid dictionary, got 3"),
        ("source: m\nstages: ['laconic.tensor:TensorSpec']", "laconic.tensor:TensorSpec is not a stage"),
        ("source: m\nstages: ['no.where:Stage']", "there is no module 'no.where'"),
        ("source: m\nseed: -1", "seed: input should be greater than or equal to 0"),
        ("- a list", "is not a recipe: expected keys and values, got list"),
        ("", "is not a recipe: expected keys and values, got NoneType"),
        ("source: [", "is not valid YAML"),
        ("source: m\nsource: n", "'source' is given twice"),
        ("source: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_a_mistake_is_answered_with_the_file_the_key_and_what_was_expected(text, message, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, trust=True)
    assert message in str(caught.value)
    assert "recipe.yaml" in str(caught.value)


def settings_models():
    """Every model of a recipe, of compression or of training, that refuses unknown keys."""
    found = [Strict]
    for model in found:
        found += model.__subclasses__()
    assert Training in found
    return found


@pytest.mark.parametrize("model", settings_models())
def test_an_earlier_key_of_a_recipe_is_refused_with_the_new_one(model):
    for old, new in model.renamed.items():
        assert new in model.model_fields
        assert old not in model.model_fields
        with pytest.raises(ValidationError, match=f"key '{old}' is now called '{new}'"):
            model.model_validate({old: None})


def test_the_refusal_of_an_earlier_key_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Goal, "renamed", {"max_loss": "max_drop"})
    (tmp_path / "recipe.yaml").write_text("source: m\ngoal: {max_loss: 1%}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: goal: key 'max_loss' is now called 'max_drop'"):
        Recipe.load(tmp_path / "recipe.yaml")


def test_a_missing_recipe_is_named_and_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"there is no recipe .*none\.yaml"):
        Recipe.load(tmp_path / "none.yaml")
    (tmp_path / "stage_of_torch.py").write_text("import torch_not_here")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match="torch_not_here"):
        load(tmp_path, "source: m\nstages: ['stage_of_torch:Stage']", trust=True)


@pytest.mark.parametrize(
    ("stages", "source", "message"),
    [
        (["quantize.static", "prune.some"], "m", r"stages\[1\] \(prune.some\) must come before quantize.static"),
        (
            ["quantize.static", "quantize.static"],
            "m",
            r"stages\[1\] \(quantize.static\) .* a model is quantized only once",
        ),
        (["prune.some"], "m.onnx", r"stages\[0\] \(prune.some\) .* the source is an ONNX file"),
    ],
)
def test_stages_out_of_order_are_refused_before_anything_runs(stages, source, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.default(source, stages=stages)


names = st.text("abcdefgh-_/. é", min_size=1).filter(str.strip)
shares = st.none() | st.floats(0, 1)
recipes = st.builds(
    Recipe,
    source=names,
    task=st.sampled_from([None, *registry.TASKS]),
    builder=st.sampled_from([None, "package.module:factory"]),
    arguments=st.dictionaries(names, st.integers() | st.booleans() | names, max_size=2),
    inputs=st.lists(
        st.builds(
            TensorSpec,
            name=names,
            dtype=st.just("int64"),
            shape=st.just(("batch", "seq")),
            bounds=st.just({"seq": (1, 9)}),
        ),
        max_size=2,
    ).map(tuple),
    data=st.builds(Data, calibrate=st.none() | names.map(Path), evaluate=st.none() | names.map(Path)),
    stages=st.sampled_from(
        [(), (NamedStage(name="quantize.static"),), (NamedStage(name="prune.some", config={"keep": 0.1}),)]
    ),
    runtimes=st.sampled_from([(), ("onnxruntime",)]),
    goal=st.builds(
        Goal,
        fidelity=shares,
        worst=shares,
        max_drop=shares,
        max_latency=st.none() | st.floats(1e-6, 1e3).map(lambda seconds: f"{seconds!r} s"),
        max_size=st.none() | st.integers(1, 10**12),
    ),
    seed=st.integers(0, 2**31),
)


@given(recipes)
def test_a_recipe_reads_back_as_it_was_written_in_yaml_and_in_json(recipe):
    assert Recipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe
    assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


def test_the_schema_knows_every_key_and_every_stage():
    schema = make_json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]["NamedStage"]["oneOf"][1]["properties"]) == set(registry.STAGES)
    assert schema["properties"]["target"]["enum"] == ["cpu", "cuda", "tensorrt"]
    json.dumps(schema)
