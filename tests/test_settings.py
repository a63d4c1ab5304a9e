"""The recipe of training: read, checked to the bottom, and written as it was."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from laconic.commands.command_line import app
from laconic.config import NamedSettings
from laconic.errors import RecipeError
from train.settings import Training, TrainingRecipe


def load(tmp_path, text, **given):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return TrainingRecipe.load(path, **given)


def test_what_is_not_said_is_as_people_fine_tune(tmp_path):
    recipe = load(tmp_path, "source: model\ndata: d.jsonl\n")
    assert recipe.source == str(tmp_path / "model")
    assert recipe.data.train == tmp_path / "d.jsonl"
    assert (recipe.batch_size, recipe.epochs, recipe.max_grad_norm, recipe.seed) == (16, 3.0, 1.0, 0)
    assert recipe.optimizer.config["lr"] == 5e-5
    assert recipe.components().techniques == {}
    with pytest.raises(RecipeError, match=r"^command line: source: field required"):
        TrainingRecipe.load(None, data={"train": "d"})


def test_the_command_line_stands_above_the_file(tmp_path):
    recipe = load(
        tmp_path, "source: a\ndata: {train: d.jsonl, limit: 9}\nbatch_size: 4\n", batch_size=2, data={"train": "e.csv"}
    )
    assert recipe.batch_size == 2
    assert str(recipe.data.train) == "e.csv"
    assert recipe.data.limit == 9
    recipe = load(tmp_path, "source: a\ndata: d.jsonl\n", data={"evaluate": "e.jsonl"})
    assert recipe.data.train == tmp_path / "d.jsonl"
    assert str(recipe.data.evaluate) == "e.jsonl"


def test_it_reads_back_as_it_was_written(tmp_path):
    text = """
source: model
data: {train: d.jsonl, evaluate: e.jsonl}
task: text-generation
max_length: 9
techniques: [sdpa, {gradient-checkpointing: {policy: selective}}, {gradient-accumulation: {rows: 2}}]
optimizer: {lion: {lr: 0.001}}
schedule: {cosine: {floor: 0.1}}
memory: 2GiB
loader: {workers: 0}
mesh: {replicate: 2}
"""
    recipe = load(tmp_path, text)
    (tmp_path / "again").mkdir()
    assert load(tmp_path / "again", recipe.to_yaml()) == recipe
    assert recipe.memory == 2 * 2**30


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("batch_siz: 2", "unknown key 'batch_siz'. Did you mean 'batch_size'?"),
        ("batch_size: 0", "batch_size: input should be greater than or equal to 1, got 0"),
        ("epochs: 0", "epochs: input should be greater than 0, got 0"),
        ("memory: lots", "memory: expected a size as 25 MB, 8 GiB or a number of bytes, got 'lots'"),
        ("task: causal-lm", "task: task 'causal-lm' is now called 'text-generation'"),
        ("optimizer: adam", "unknown optimizer 'adam'. Did you mean 'adamw'?"),
        ("optimizer: {sgd: {rate: 1}}", "sgd: unknown key 'rate'"),
        ("schedule: {cosine: {floor: 2}}", "cosine: floor: input should be less than or equal to 1, got 2"),
        ("techniques: [sdqa]", "unknown technique 'sdqa'. Did you mean 'sdpa'?"),
        ("techniques: [sdpa, {sdpa: {}}]", "sdpa is given twice"),
        ("techniques: sdpa", "techniques: input should be a list, got 'sdpa'"),
        ("techniques: [{a: 1, b: 2}]", "expected a name, or {name: {setting: value}}"),
        ("techniques: [fp16, bf16]", "fp16 and bf16 cannot be combined: each is the precision of a step"),
        ("techniques: [optimizer-in-backward]", "in-backward and gradient clipping cannot be combined"),
        ("techniques: [host-weights]", "host-weights works on top of layerwise. Add it"),
        ("techniques: ['models:Keep']", "models:Keep is not a technique"),
        ("techniques: ['laconic.recipes.recipe:Goal']", "laconic.recipes.recipe:Goal is not a technique"),
        ("optimizer: laconic.recipes.recipe:Goal", "laconic.recipes.recipe:Goal is not a"),
        ("data: {train: d.jsonl, calibrate: e}", "data: unknown key 'calibrate'"),
        ("data: {evaluate: e}", "data.train: field required"),
        ("builder: models", "builder: expected 'package.module:factory', got 'models'"),
        ("loader: {workers: -1}", "loader.workers"),
        ("loader: {pin: true}", "loader: key 'pin' is now called 'pin_memory'"),
        ("batch: 2", "key 'batch' is now called 'batch_size'"),
        ("length: 9", "key 'length' is now called 'max_length'"),
        ("clip: 1.0", "key 'clip' is now called 'max_grad_norm'"),
        ("feed: {workers: 0}", "key 'feed' is now called 'loader'"),
        ("every: 9", "key 'every' is now called 'snapshot_every'"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(tmp_path, line, said):
    start = "source: model\n" + ("" if line.startswith("data") else "data: d.jsonl\n")
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, start + line, trust=True)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "recipe.yaml"))
    assert "\n" not in str(caught.value)


@given(st.integers(1, 1000), st.integers(1, 100), st.integers(1, 5))
def test_epochs_are_whole_batches_of_which_the_last_may_be_smaller(rows, batch, epochs):
    of_one = -(-rows // batch)
    assert Training(batch_size=batch, epochs=epochs).count_steps(rows) == epochs * of_one
    assert Training(batch_size=batch, epochs=0.001).count_steps(rows) >= 1
    assert Training(batch_size=batch, epochs=epochs, steps=7).count_steps(rows) == 7


def test_techniques_can_be_exchanged_with_nothing_else_changed():
    training = Training(batch_size=3, techniques=(NamedSettings(name="bf16"),))
    other = training.with_techniques((NamedSettings(name="sdpa"),), max_grad_norm=None)
    assert [named.name for named in other.techniques] == ["sdpa"]
    assert (other.batch_size, other.max_grad_norm, training.max_grad_norm) == (3, None, 1.0)


def parse(*arguments):
    """The recipe that `laconic finetune` shows; raises what it refuses."""
    result = CliRunner().invoke(
        app, ["finetune", "model", "--data", "d.jsonl", "--show-recipe", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0
    return yaml.safe_load(result.stdout)


def test_the_settings_that_people_reach_for_first_are_options():
    shown = parse("--technique", "lora", "--lr", "1e-4", "--epochs", "2", "--steps", "7", "--seed", "3")
    assert shown["techniques"] == ["lora"]
    assert shown["optimizer"] == {"adamw": {"lr": 1e-4, "weight_decay": 0.01}}
    assert (shown["epochs"], shown["steps"], shown["seed"]) == (2.0, 7, 3)
    shown = parse("--technique", "lora: {rank: 8}", "--technique", "sdpa")
    assert shown["techniques"] == [{"lora": {"rank": 8}}, "sdpa"]


def test_set_reaches_every_key_and_overrides_file_and_options(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("batch_size: 4\noptimizer: lion\ndata: {train: t.jsonl, limit: 9}\n")
    keys = ("batch_size=5", "data.limit=50", "schedule=cosine", "optimizer.lion.weight_decay=0.2", "max_grad_norm=null")
    shown = parse("--recipe", str(path), "--batch", "6", "--lr", "1e-5", *(f"--set={key}" for key in keys))
    assert (shown["batch_size"], shown["data"]["limit"], shown["schedule"]) == (5, 50, "cosine")
    assert shown["optimizer"] == {"lion": {"weight_decay": 0.2, "lr": 1e-5}}
    assert shown["max_grad_norm"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "batch_sise=3"), "Did you mean 'batch_size'"),
        (("--set", "batch_size"), "expected key=value"),
        (("--set", "batch_size=[1"), "not valid YAML"),
        (("--set", "batch_size=none"), "batch_size"),
        (("--set", "batch=3"), "now called 'batch_size'"),
        (("--technique", "lorra"), "Did you mean 'lora'"),
        (("--technique", "lora: {rang: 3}"), "rank"),
        (("--lr", "-1"), "lr"),
    ],
)
def test_wrong_settings_of_the_command_line_are_refused_as_in_a_recipe(arguments, says):
    with pytest.raises(RecipeError) as error:
        parse(*arguments)
    assert says in str(error.value)
