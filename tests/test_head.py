"""A model learns labels that it never had: a new head of the right size, everything else as it was."""

import json
import subprocess
import sys
from importlib.util import find_spec

import models
import pytest
import torch
import transformers

from laconic.errors import DataError, SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.tasks.classes import class_names
from train.finetune.head import labels_of, open_for, with_labels
from train.settings import TrainingRecipe

LABELS = ["red", "green", "blue", "green", "black"]


def save_resnet(folder):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", id2label={0: "cat", 1: "dog"}
    )
    return save_images(folder, transformers.ResNetForImageClassification(config))


def save_convnext(folder):
    config = transformers.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], patch_size=2)
    return save_images(folder, transformers.ConvNextForImageClassification(config))


def save_bare_vit(folder):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    return save_images(folder, transformers.ViTModel(config))


def save_images(folder, model):
    models.randomize(model).save_pretrained(folder)
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    settings["image_processor_type"] = "ViTImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def save_bare_roberta(folder):
    return models.save_roberta(folder)


SOURCES = {
    "classifier": ("text-classification", models.save_bert),
    "embedder": ("text-classification", models.save_embedder),
    "distilbert": ("text-classification", models.save_distilbert),
    "bare roberta": ("text-classification", save_bare_roberta),
    "vit": ("image-classification", models.save_vit),
    "bare vit": ("image-classification", save_bare_vit),
    "resnet": ("image-classification", save_resnet),
    "convnext": ("image-classification", save_convnext),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_new_head_goes_onto_any_source_and_comes_back_from_disk(tmp_path, name):
    task, save = SOURCES[name]
    source = save(tmp_path / "source")
    made = with_labels(source, task, LABELS, seed=1)
    assert made.task.labels == ("black", "blue", "green", "red")
    assert made.outputs[0].shape == ("batch", 4)
    own = {key.removeprefix("model."): value for key, value in made.module.state_dict().items()}
    auto = transformers.AutoModel.from_pretrained(source)
    prefix = made.module.model.base_model_prefix
    kept = {f"{prefix}.{key}": value for key, value in auto.state_dict().items()}
    same = [key for key in kept if key in own and not key.startswith(f"{prefix}.pooler")]
    assert len(same) > 5
    assert all(torch.equal(own[key], kept[key]) for key in same)
    made.save(tmp_path / "saved")
    assert load_source(tmp_path / "saved").key == made.key
    assert with_labels(source, task, reversed(LABELS), seed=1).key == made.key
    assert with_labels(source, task, LABELS, seed=2).key != made.key


def test_labels_that_the_model_has_change_nothing(tmp_path):
    source = models.save_bert(tmp_path / "source")
    assert with_labels(source, "text-classification", ["yes", "no"]).key == load_source(source).key
    assert with_labels(source, "text-classification", [0, 2]).key == load_source(source).key
    assert with_labels(load_source(source), "text-classification", ["yes", 1]).key == load_source(source).key


def test_other_labels_of_the_same_number_get_a_head_that_knows_nothing(tmp_path):
    source = models.save_bert(tmp_path / "source")
    made = with_labels(source, "text-classification", ["a", "b", "c"])
    weight = made.module.model.classifier.weight
    assert weight.shape == load_source(source).module.model.classifier.weight.shape
    assert not torch.equal(weight, load_source(source).module.model.classifier.weight)
    assert weight.std() < 0.04
    assert not made.module.model.classifier.bias.any()


def test_a_saved_classifier_gets_a_new_head_too(tmp_path):
    load_source(models.save_bert(tmp_path / "source")).save(tmp_path / "saved")
    made = with_labels(tmp_path / "saved", "text-classification", LABELS)
    assert made.task.labels == ("black", "blue", "green", "red")
    before = Checkpoint.load(tmp_path / "saved")
    assert before.task.labels == ("no", "maybe", "yes")
    new, old = made.module.state_dict(), before.module.state_dict()
    assert {name for name in old if not torch.equal(new[name], old[name])} == {
        "model.classifier.weight",
        "model.classifier.bias",
    }
    made.save(tmp_path / "again")
    assert load_source(tmp_path / "again").key == made.key
    with pytest.raises(SourceError, match="goes onto the folder"):
        with_labels(tmp_path / "saved", "image-classification", LABELS)


def test_a_source_that_lacks_more_than_its_head_is_refused(tmp_path):
    source = models.save_bert(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(SourceError, match=r"encoder\.layer\.2"):
        with_labels(source, "text-classification", LABELS)
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises(SourceError, match="intermediate"):
        with_labels(source, "text-classification", LABELS)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([3, 1, 1], ("1", "2", "3")),
        ([3, 0, 1], ("0", "1", "2", "3")),
        ([3, 2], ("0", "1", "2", "3")),
        (["5", "1"], ("1", "2", "3", "4", "5")),
        (["10", "9"], tuple(map(str, range(11)))),
        (["1000", "9"], ("9", "1000")),
        ([True, False], ("False", "True")),
        (["7", "cat"], ("7", "cat")),
        (["01", "02", "03"], ("01", "02", "03")),
        (["1", "01", "2"], ("01", "1", "2")),
        ([1000, 7], ("7", "1000")),
        ([1, -1], ("-1", "1")),
        (["1", "-1"], ("-1", "1")),
    ],
)
def test_the_classes_of_a_new_head_are_the_labels_in_order(labels, names):
    assert class_names(labels) == names


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", 1], "not both"),
        (["a", "a"], "nothing to tell apart"),
    ],
)
def test_labels_that_make_no_classes_are_refused(labels, message):
    with pytest.raises(DataError, match=message):
        class_names(labels)


def recipe(tmp_path, source, text, **given):
    (tmp_path / "data.jsonl").write_text(text)
    return TrainingRecipe(source=str(source), data=tmp_path / "data.jsonl", **given)


def test_a_recipe_opens_its_source_with_the_labels_of_its_samples(tmp_path):
    rows = '{"text": "hello", "label": "x"}\n{"text": "world", "label": "y"}\n'
    bert, embedder = models.save_bert(tmp_path / "bert"), models.save_embedder(tmp_path / "embedder")
    assert open_for(recipe(tmp_path, bert, rows)).task.labels == ("x", "y")
    made = open_for(recipe(tmp_path, embedder, rows, task="text-classification"))
    assert made.task.name == "text-classification"
    assert made.task.max_tokens == 48
    assert open_for(recipe(tmp_path, embedder, rows)).task.name == "text-embedding"
    gpt = models.save_gpt2(tmp_path / "gpt2")
    assert open_for(recipe(tmp_path, gpt, rows)).task.name == "text-generation"
    with pytest.raises(DataError, match="no labels"):
        open_for(recipe(tmp_path, bert, '{"text": "hello"}\n'))
    with pytest.raises(DataError, match="no samples"):
        labels_of(recipe(tmp_path, bert, "").data.train, "text-classification")
    with pytest.raises(DataError, match=r"0\.5 is no class"):
        open_for(recipe(tmp_path, bert, '{"text": "hello", "label": 0.5}\n'))


def test_a_new_head_is_announced(tmp_path, capsys):
    bert = models.save_bert(tmp_path / "bert")
    rows = '{"text": "hello", "label": "x"}\n{"text": "world", "label": "y"}\n'
    open_for(recipe(tmp_path, bert, rows), steps=Steps())
    known = ", ".join(load_source(bert).task.labels)
    assert f"a new head for 2 classes, x, y, is trained from random weights: the model's classes are {known}" in (
        capsys.readouterr().err
    )
    open_for(recipe(tmp_path, bert, rows.replace('"x"', "0").replace('"y"', "1")), steps=Steps())
    assert "new head" not in capsys.readouterr().err


def test_a_head_for_another_number_of_labels_than_the_config_has_is_told_in_one_sentence(tmp_path):
    bert = models.save_bert(tmp_path / "bert")
    config = json.loads((bert / "config.json").read_text())
    config |= {"id2label": {str(index): f"c{index}" for index in range(5)}, "label2id": {}}
    (bert / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"another number of labels\. Give config\.json an id2label") as told:
        load_source(bert)
    assert "classifier.bias is [" in str(told.value)
    assert "[5] by its config.json" in str(told.value)
    made = with_labels(bert, "text-classification", ["x", "y"])
    assert made.task.labels == ("x", "y"), "a new head needs nothing of the old one"


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_a_command_prints_nothing_of_what_torchao_has_to_say():
    code = "import laconic.cli; import torchao"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
