"""Folders of timm: the module and the weights by timm, and images prepared as by its own transform.

Where timm is not installed, `stand_ins/timm` stands for it; `pip install timm` to run these tests with timm itself.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from laconic.errors import MissingPackage, SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.image_processor import PIXEL_ERROR, make_probe_images
from laconic.models.source_loading import find_task, load_source
from laconic.models.timm_folder import read_timm
from laconic.tasks.task import open_task
from train.finetune.head import with_labels
from train.planner.meta_model import open_meta_model

CLASSES = ["cat", "dog", "fish"]


@pytest.fixture
def timm():
    """timm, or what stands for it in one test: other libraries use timm where they find it."""
    path = [str(Path(__file__).parent / "stand_ins")] if find_spec("timm") is None else []
    sys.path[:0] = path
    yield importlib.import_module("timm")
    if path:
        sys.path.remove(path[0])
        for name in [each for each in sys.modules if each.partition(".")[0] == "timm"]:
            del sys.modules[name]


@pytest.fixture
def save(timm, tmp_path):
    """Saves a model as timm does. changes: of its config.json."""

    def save(model_config=None, changes=None, data_config=None, **arguments):
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", **arguments).eval()
        importlib.import_module("timm.models").save_for_hf(
            model,
            tmp_path / "model",
            model_config=model_config,
            safe_serialization=True,
            data_config={"input_size": (3, 48, 48)} | (data_config or {}),
        )
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (changes or {})))
        return tmp_path / "model", model

    return save


def test_images_are_prepared_as_by_timm(timm):
    data = importlib.import_module("timm.data")
    sizes, shares, modes = ((48, 48), (49, 49), (40, 64)), (1.0, 0.875, 1.2), ("center", "squash", "border")
    for (sides, share, mode), (channels, name) in product(
        product(sizes, shares, modes), ((3, "bicubic"), (3, "nearest"), (1, "bilinear"))
    ):
        given = {"input_size": (channels, *sides), "crop_pct": share, "crop_mode": mode, "interpolation": name}
        given |= {"mean": (0.485, 0.456, 0.406)[:channels], "std": (0.229, 0.224, 0.225)[:channels]}
        settings = data.resolve_data_config({}, pretrained_cfg=given)
        transform, made = data.create_transform(**settings), read_timm(settings)
        for image in make_probe_images(channels, converts=False):
            expected, found = transform(image).numpy(), made.apply(image)
            assert found.shape == expected.shape == (channels, *sides)
            assert np.abs(found - expected).max() <= PIXEL_ERROR, given


def test_a_folder_answers_as_timm_does_and_opens_again_with_the_same_bits(save, tmp_path):
    folder, model = save({"label_names": CLASSES}, num_classes=3)
    checkpoint = load_source(folder)
    assert (checkpoint.task.name, checkpoint.task.labels) == ("image-classification", tuple(CLASSES))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    pixels = torch.from_numpy(checkpoint.task.preprocess.apply(image))[None]
    assert pixels.shape == (1, 3, 48, 48)
    with torch.inference_mode():
        assert torch.equal(checkpoint.module(pixels), model(pixels))
    checkpoint.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").key == checkpoint.key
    assert open_task(checkpoint.task.name, tmp_path / "saved", checkpoint.inputs).preprocess == (
        checkpoint.task.preprocess
    )


def test_names_of_classes_may_be_given_by_number_and_be_missing(save):
    assert load_source(save({"label_names": {"0": "cat", "2": "fish"}}, num_classes=3)[0]).task.labels == (
        "cat",
        "1",
        "fish",
    )
    names = load_source(save(num_classes=1000)[0]).task.labels
    assert len(names) == 1000
    assert not names[5].isdecimal()  # those of ImageNet, which the weights were trained with


def test_without_a_head_a_folder_embeds_images(save, tmp_path):
    folder, model = save(num_classes=0)
    assert load_source(folder).task.name == find_task(folder) == "image-embedding"
    with pytest.raises(SourceError, match=r"has no head .*--task image-embedding"):
        load_source(folder, task="image-classification")
    wrapped = {"architectures": ["TimmWrapperModel"], "num_classes": 2}  # as transformers saves it
    for found in (load_source(save(num_classes=0, changes=wrapped)[0]), embedder(save(num_classes=3)[0])):
        assert found.outputs[0].shape == ("batch", model.num_features)
        found.save(tmp_path / "saved")
        assert Checkpoint.load(tmp_path / "saved").key == found.key


def embedder(folder):
    return load_source(folder, task="image-embedding")


def test_a_new_head_has_the_classes_of_the_samples(save, tmp_path):
    folder, model = save({"label_names": CLASSES}, num_classes=3)
    assert with_labels(folder, "image-classification", ["dog", "cat"]).task.labels == tuple(CLASSES)
    found = with_labels(folder, "image-classification", ["bird", "ape"])
    assert found.task.labels == ("ape", "bird")
    assert found.outputs[0].shape == ("batch", 2)
    name, weight = next(iter(model.named_parameters()))
    assert torch.equal(found.module.model.get_parameter(name), weight)
    found.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").key == found.key


def test_a_plan_needs_no_weights(save):
    folder, model = save(num_classes=3)
    (folder / "model.safetensors").unlink()
    found = open_meta_model(folder)
    assert found.task.inputs[0].shape == ("batch", 3, 48, 48)
    assert sum(each.numel() for each in found.module.parameters()) == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "test_unheard"}, "has no model 'test_unheard'"),
        ({"num_classes": 5}, "num_classes: 5, and by its model_args there are 3"),
        ({"label_names": ["a", "b", "c", "d"]}, "num_classes: 3, and names 4 classes"),
        ({"pretrained_cfg": []}, "settings of other types"),
        ({"pretrained_cfg": {"interpolation": "random"}}, "interpolation 'random'"),
        ({"pretrained_cfg": {"input_size": 48}}, "."),
        ({"model_args": {"num_classes": 3, "width_of_nothing": 4}}, "does not load .*width_of_nothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said, save):
    with pytest.raises(SourceError, match=said):
        load_source(save(num_classes=3, changes=changes)[0])


def test_damaged_folders_are_refused(save):
    folder, _ = save(num_classes=3)
    with pytest.raises(SourceError, match=r"test_resnet of timm, which is not for the task 'text-embedding'"):
        load_source(folder, task="text-embedding")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"does not load .*copy it again"):
        load_source(folder)
    weights.unlink()
    with pytest.raises(SourceError, match=r"has no model.safetensors"):
        load_source(folder)


def test_a_transform_with_other_rules_is_refused(save, monkeypatch):
    folder, _ = save(num_classes=3)
    data = importlib.import_module("timm.data")
    own = data.create_transform
    monkeypatch.setattr(data, "create_transform", lambda **given: lambda image: own(**given)(image).flip(-1))
    with pytest.raises(SourceError, match=r"rules that Laconic does not know: .* normalized values differ"):
        load_source(folder)


def test_a_timm_that_is_missing_or_does_not_import_is_told(save, monkeypatch, tmp_path):
    folder, _ = save(num_classes=3)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingPackage, match=r"pip install 'laconic\[timm\]'"):
        load_source(folder)
    folder, _ = save(num_classes=3)
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    for name in [each for each in sys.modules if each.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SourceError, match=r"does not import .*nms.* build of torchvision"):
        load_source(folder)
