"""Semantic segmentation: masks are those of transformers' pipeline, and are learnt from maps of classes."""

import base64
import io
import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from contexts import tune
from models import png
from PIL import Image
from served import running

from compress.pipeline import compress
from laconic.errors import DataError, InputError
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks.semantic_segmentation import IGNORED, choose_classes, count_overlap, make_iou_scorer

QUIET = Steps(quiet=True)
SIZES = ((48, 80), (64, 64), (33, 20))
"""Heights and widths of images."""


def draw(seed: int) -> tuple[Image.Image, Image.Image]:
    """An image of two halves, and its map of classes: dark is class 0, light class 2, and the border is of none."""
    rng = np.random.default_rng(seed)
    height, width = SIZES[seed % len(SIZES)]
    classes = np.zeros((height, width), np.uint8)
    classes[:, width // 2 :] = 2
    if seed % 2:
        classes = 2 - classes
    pixels = np.where(classes[..., None] == 2, 200, 40) + rng.integers(-20, 20, (height, width, 3))
    classes[:2] = IGNORED
    return Image.fromarray(pixels.astype(np.uint8)), Image.fromarray(classes)


def write_rows(folder: Path, count: int) -> Path:
    lines = []
    for seed in range(count):
        for image, suffix in zip(draw(seed), ("image", "map"), strict=True):
            image.save(folder / f"{seed}-{suffix}.png")
        lines.append(json.dumps({"image": f"{seed}-image.png", "label": f"{seed}-map.png"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def read_mask(answer: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["mask"]))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_segformer(tmp_path_factory.mktemp("segformer"))


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_the_pipeline_at_the_size_of_the_image(folder, seed):
    image, _ = draw(seed)
    checkpoint = load_source(folder)
    task = checkpoint.task
    sample = task.parse(png(image))
    with torch.no_grad():
        outputs = checkpoint.module(**{name: torch.from_numpy(each) for name, each in task.encode([sample]).items()})
    (answer,) = task.decode({"logits": outputs.numpy()}, [sample])
    pipeline = transformers.pipeline("image-segmentation", str(folder), device="cpu")
    expected = {each["label"]: np.asarray(each["mask"]) == 255 for each in pipeline(image, subtask="semantic")}
    mask = read_mask(answer)
    assert mask.shape == (image.height, image.width)
    assert {each["label"] for each in answer["segments"]} == set(expected)
    for each in answer["segments"]:
        np.testing.assert_array_equal(mask == each["class"], expected[each["label"]])
        assert each["share"] == pytest.approx(expected[each["label"]].mean())


@pytest.mark.parametrize("size", [(3, 5), (17, 9), (64, 100)])
def test_logits_are_interpolated_as_by_torch(size):
    logits = np.random.default_rng(0).standard_normal((4, 9, 7)).astype(np.float32)
    wanted = torch.nn.functional.interpolate(torch.from_numpy(logits)[None], size, mode="bilinear")[0].argmax(0)
    assert (choose_classes(logits, size) == wanted.numpy()).mean() > 0.995  # two classes may be equal to a rounding


def test_iou_is_of_all_samples_together_and_leaves_out_pixels_of_no_class():
    wanted = np.array([[[0, 0], [1, IGNORED]], [[1, 1], [1, 1]]])
    found = np.array([[[0, 1], [1, 1]], [[1, 1], [1, 0]]])
    score = make_iou_scorer(*count_overlap(found, wanted, 3))
    assert score(np.array([0])) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert score(np.array([0, 1])) == pytest.approx((1 / 3 + 4 / 6) / 2)


def test_it_learns_from_maps_and_what_it_learned_is_compressed_and_served(folder, cache, tmp_path):
    tuned = tune(folder, write_rows(tmp_path, 80), tmp_path / "tuned", cache, batch_size=8, steps=60)
    assert tuned.after["mean IoU"] > max(tuned.before["mean IoU"], 0.4)
    recipe = Recipe(source=str(tmp_path / "tuned"), data=str(tmp_path / "rows.jsonl"), runtimes=("onnxruntime",))
    artifact = compress(recipe, tmp_path / "seg.laconic", steps=QUIET, cache=cache).artifact
    assert artifact.manifest.verdict.failures == []
    assert "metric" in artifact.manifest.verdict.drift[0].figures
    image, wanted = draw(1)
    with running(artifact.path) as server, server.client() as client:
        answer = client.post("/v1/models/seg/predict", content=png(image), headers={"content-type": "image/png"}).json()
        found = read_mask(answer["answers"][0])
        kept = np.asarray(wanted) != IGNORED
        assert (found == np.asarray(wanted))[kept].mean() > 0.9
        array = load_source(tmp_path / "tuned").task.parse(png(image))["pixels"].tolist()
        whole = client.post("/v1/models/seg/predict", json={"image": [array]}).json()
        assert read_mask(whole["answers"][0]).shape == (64, 64)


@pytest.mark.parametrize(
    ("label", "told"),
    [
        (png(Image.new("RGB", (64, 64))), "one channel"),
        ([[0, 1], [1, 0]], "the size of the model's input"),
        ("cat", "map of classes"),
        (np.full((64, 64), 7), "class 7"),
    ],
)
def test_labels_that_are_no_maps_are_refused(folder, label, told):
    task = load_source(folder).task
    sample = task.parse(png(draw(1)[0]))
    with pytest.raises((InputError, DataError), match=told):
        task.parse_label(label, sample)
