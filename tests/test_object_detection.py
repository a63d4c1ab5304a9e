"""Object detection: objects are those of transformers' pipeline, compared by what is found, and scored as by COCO."""

import json
import re
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
from torch import nn

from compress.pipeline import compress
from export.capture.graph_forms import graph_forms
from laconic.data.reader import read
from laconic.errors import DataError, InputError, SourceError
from laconic.models.image_processor import measure_pixel_error, open_processor, read_preprocess
from laconic.models.object_detector import read_scoring
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks import object_detection
from laconic.tasks.detections import Detections, compare_detections, make_precision_scorer
from laconic.tasks.task import open_task

QUIET = Steps(quiet=True)
SIZES = ((48, 64), (64, 48), (50, 100))
"""Heights and widths of images."""
FAMILIES = {
    "Detr": {},
    "ConditionalDetr": {},
    "Yolos": {},
    "RTDetr": {"size": {"height": 64, "width": 64}},
    "DeformableDetr": {"size": {"height": 128, "width": 128}},
}
"""Detectors, with what is particular to their image processors."""
A, B = [0.1, 0.1, 0.5, 0.5], [0.5, 0.5, 0.9, 0.9]


def draw(seed: int) -> tuple[Image.Image, list[dict]]:
    """An image with a rectangle or two, each in one of the model's colours, and its objects."""
    rng = np.random.default_rng(seed)
    height, width = SIZES[seed % len(SIZES)]
    pixels, objects = rng.integers(90, 130, (height, width, 3)).astype(np.uint8), []
    for _ in range(rng.integers(1, 3)):
        number, (wide, high) = int(rng.integers(3)), rng.integers(14, 30, 2).tolist()
        x, y = int(rng.integers(0, width - wide)), int(rng.integers(0, height - high))
        pixels[y : y + high, x : x + wide] = 220 * np.eye(3, dtype=np.uint8)[number]
        box = {"xmin": x, "ymin": y, "xmax": x + wide, "ymax": y + high}
        objects.append({"label": models.COLOURS[number], "box": box})
    return Image.fromarray(pixels), objects


def write_rows(folder: Path, count: int) -> Path:
    lines = []
    for seed in range(count):
        image, objects = draw(seed)
        image.save(folder / f"{seed}.png")
        lines.append(json.dumps({"image": f"{seed}.png", "label": objects}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def as_detections(*objects: tuple[float, int, list[float]]) -> Detections:
    scores, classes, boxes = zip(*objects, strict=True) if objects else ((), (), ())
    return Detections(np.array(scores), np.array(classes, int), np.array(boxes, np.float32).reshape(-1, 4))


def assert_same(found: list[dict], expected: list[dict]) -> None:
    """The same objects in the same order. An edge may be on the other side of a whole pixel by rounding."""
    assert [each["label"] for each in found] == [each["label"] for each in expected]
    assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected], abs=1e-4)
    edges = [[list(each["box"].values()) for each in objects] for objects in (found, expected)]
    np.testing.assert_allclose(*edges, atol=1)
    assert [list(each["box"]) for each in found] == [list(each["box"]) for each in expected]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_detector(tmp_path_factory.mktemp("detr"), "Detr")


@pytest.mark.sweep("DeformableDetr", "ConditionalDetr")
@pytest.mark.parametrize("family", FAMILIES)
def test_objects_are_those_of_the_pipeline(family, tmp_path, monkeypatch):
    monkeypatch.setattr(object_detection, "THRESHOLD", 0.001)
    folder = models.save_detector(tmp_path / "m", family, **FAMILIES[family])
    pipeline = transformers.pipeline("object-detection", str(folder), device="cpu")
    checkpoint = load_source(folder)
    (tmp_path / "assets").mkdir()
    for name, content in checkpoint.task.assets().items():
        (tmp_path / "assets" / name).write_bytes(content)
    for task in (checkpoint.task, open_task("object-detection", tmp_path / "assets", checkpoint.inputs)):
        for seed in range(3):
            image, _ = draw(seed)
            sample = task.parse(png(image))
            with torch.no_grad():
                outputs = checkpoint.module(torch.from_numpy(task.encode([sample])["pixel_values"]))
            (answer,) = task.decode({name: each.numpy() for name, each in outputs.items()}, [sample])
            expected = pipeline(image, threshold=0.001)
            assert expected
            assert_same(answer["objects"], expected)


@pytest.mark.parametrize("family", ["Detr", "Yolos"])
def test_images_of_any_form_are_resized_as_by_transformers(family, tmp_path):
    settings = {"image_processor_type": f"{family}ImageProcessor", "size": {"shortest_edge": 50, "longest_edge": 128}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, made = open_processor(tmp_path), read_preprocess(tmp_path, channels=3)

    def own(image):
        return np.asarray(processor(images=image, return_tensors="np")["pixel_values"][0])

    rng = np.random.default_rng(0)
    for height, width in rng.integers(30, 200, (100, 2)).tolist():
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        assert measure_pixel_error(own, made, image) < 1e-5, (height, width)


def test_processors_that_pad_or_score_otherwise_and_images_of_unfit_sizes_are_refused(tmp_path, folder):
    padded = models.save_detector(tmp_path / "padded", "Detr", pad_size={"height": 90, "width": 90})
    with pytest.raises(SourceError, match="DetrImageProcessor, whose rules Laconic does not know"):
        load_source(padded)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor"}))
    with pytest.raises(SourceError, match="does not know how it makes objects"):
        read_scoring(open_processor(tmp_path))
    with pytest.raises(SourceError, match=re.escape('one size, as "size": {"height": 800')):
        load_source(models.save_detector(tmp_path / "m", "DeformableDetr"))
    with pytest.raises(InputError, match="sides of at least 32"):
        load_source(folder).task.parse(png(Image.new("RGB", (400, 20))))


class Lengthy(transformers.PreTrainedModel):
    """Reads the size of its batch by `len`, as RT-DETR does."""

    config_class = transformers.PreTrainedConfig

    def __init__(self):
        super().__init__(transformers.PreTrainedConfig())
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x).reshape(len(x), 2) + len([x])


def test_a_batch_whose_size_is_read_by_len_stays_free():
    model, batch = Lengthy().eval(), {0: torch.export.Dim("batch")}
    with graph_forms(model):
        program = torch.export.export(model, (torch.rand(2, 3),), dynamic_shapes=(batch,))
    x = torch.rand(5, 3)
    torch.testing.assert_close(program.module()(x), model(x))
    assert "len" not in globals()


def test_fidelity_is_of_what_both_models_find_in_any_order(folder):
    one = as_detections((0.9, 0, A), (0.8, 1, B), (0.05, 2, A))
    assert compare_detections(one, one) == pytest.approx(1)
    assert compare_detections(one, one.pick(np.array([2, 0, 1]))) == pytest.approx(1)  # in any order
    assert compare_detections(one, as_detections()) == pytest.approx(0, abs=1e-6)
    assert compare_detections(as_detections(), as_detections()) == 1
    unsure = as_detections((0.05, 2, B))
    assert compare_detections(unsure, as_detections()) > 0.99  # next to nothing is found by either
    halves = compare_detections(as_detections((1.0, 0, A)), as_detections((1.0, 0, [0.1, 0.1, 0.5, 0.3])))
    assert halves == pytest.approx(0.5)
    assert compare_detections(as_detections((1.0, 0, A)), as_detections((1.0, 1, A))) == 0
    assert compare_detections(as_detections((1.0, 0, A)), as_detections((0.5, 0, A))) == pytest.approx(0.25)
    task, rng = load_source(folder).task, np.random.default_rng(0)
    outputs = {"logits": rng.random((2, 10, 4), np.float32), "boxes": rng.random((2, 10, 4), np.float32)}
    order = rng.permutation(10)
    shuffled = {name: array[:, order] for name, array in outputs.items()}
    for name, array in task.align(outputs, shuffled).items():
        np.testing.assert_array_equal(array, outputs[name])
    assert task.fidelity(outputs, shuffled) == pytest.approx([1, 1])
    with pytest.raises(InputError, match="takes two outputs"):
        task.fidelity({"y": outputs["logits"]}, {"y": outputs["logits"]})


def test_average_precision_is_that_of_coco_and_of_few_objects():
    """The figure is that of pycocotools 2.0.11 for the same objects, in an image of 1,000 x 1,000 pixels."""
    rng, found, wanted = np.random.default_rng(1), [], []
    for _ in range(12):
        count, guesses = int(rng.integers(1, 6)), int(rng.integers(1, 150))
        corner, size = rng.random((count, 2)) * 0.6, 0.1 + rng.random((count, 2)) * 0.3
        boxes, classes = np.concatenate([corner, corner + size], axis=1), rng.integers(0, 4, count)
        chosen = rng.integers(0, count, guesses)
        near = boxes[chosen] + rng.normal(0, 0.02, (guesses, 4))
        named = np.where(rng.random(guesses) < 0.8, classes[chosen], rng.integers(0, 5, guesses))
        found.append(Detections(rng.random(guesses), named, near))
        wanted.append(Detections(np.ones(count), classes, boxes))
    score = make_precision_scorer(found, wanted)
    assert score(np.arange(12)) == pytest.approx(0.3519996194065286, abs=1e-12)
    twice = make_precision_scorer([*found, *found], [*wanted, *wanted])
    assert score(np.repeat(np.arange(12), 2)) == pytest.approx(twice(np.arange(24)), abs=0.002)  # of equal scores
    wanted = [as_detections((1, 0, A), (1, 1, B))]
    assert make_precision_scorer(wanted, wanted)(np.array([0])) == pytest.approx(1)
    assert make_precision_scorer([as_detections((0.9, 0, A))], wanted)(np.array([0])) == pytest.approx(0.5)
    found = [as_detections((0.9, 0, B), (0.8, 0, A))]  # the surer one is wrong: precision is a half at every recall
    assert make_precision_scorer(found, [as_detections((1, 0, A))])(np.array([0])) == pytest.approx(0.5)
    off = [as_detections((0.9, 0, [0.1, 0.1, 0.5, 0.43]))]  # shares 0.825: right at 7 of 10 thresholds
    assert make_precision_scorer(off, [as_detections((1, 0, A))])(np.array([0])) == pytest.approx(0.7)
    assert make_precision_scorer([as_detections()], [as_detections()])(np.array([0])) == 0


def test_objects_are_read_as_in_answers_and_as_in_data_sets_of_coco(folder, tmp_path):
    image, _ = draw(0)
    image.save(tmp_path / "0.png")
    columns = {"bbox": [[16, 12, 16, 24], [0, 0, 5, 5]], "category": [1, 2], "iscrowd": [0, 1]}
    own = [{"label": "green", "box": {"xmin": 16, "ymin": 12, "xmax": 32, "ymax": 36}}]
    rows = [{"image": "0.png", "objects": columns}, {"image": "0.png", "label": own}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for label in read(tmp_path / "rows.jsonl", load_source(folder).task).labels:
        np.testing.assert_allclose(label, [[1, 0.25, 0.25, 0.5, 0.75]])


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ("cat", "a list of objects"),
        ([{"label": "red"}], "is no object"),
        ([{"label": "red", "box": {"xmin": 1, "ymin": 2, "xmax": "3", "ymax": 4}}], "is no object"),
        ([{"box": {"xmin": 1, "ymin": 2, "xmax": 3, "ymax": 4}}], "is no object"),
        ([{"label": "cat", "box": {"xmin": 1, "ymin": 2, "xmax": 3, "ymax": 4}}], "none of the model's classes"),
        ([{"label": "red", "box": {"xmin": 9, "ymin": 2, "xmax": 3, "ymax": 4}}], "has no area"),
        ([{"label": "red", "box": {"xmin": 99, "ymin": 2, "xmax": 100, "ymax": 4}}], "has no area"),
    ],
)
def test_labels_that_are_no_objects_are_refused(folder, label, told):
    task = load_source(folder).task
    with pytest.raises(DataError, match=told):
        task.parse_label(label, task.parse(png(draw(0)[0])))


@pytest.mark.parametrize("objects", ["cat", {"bbox": [[1, 2, 3]], "category": [0]}, {"bbox": [], "category": [0]}])
def test_columns_that_hold_no_objects_are_refused(folder, objects, tmp_path):
    draw(0)[0].save(tmp_path / "0.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "0.png", "objects": objects}))
    with pytest.raises(DataError, match=r"rows.jsonl, row 1: .* under 'objects'"):
        read(tmp_path / "rows.jsonl", load_source(folder).task)


def test_it_is_trained_on_images_of_any_size_compressed_and_served(folder, cache, tmp_path):
    rows = write_rows(tmp_path, 60)
    tuned = tune(folder, rows, tmp_path / "tuned", cache, lr=0.001, batch_size=8, steps=16)
    assert tuned.after["loss"] < tuned.before["loss"]
    assert 0 <= tuned.after["mAP"] <= 1
    recipe = Recipe(source=str(folder), data=str(rows), runtimes=("onnxruntime",), goal={"fidelity": 0.9999}, stages=[])
    artifact = compress(recipe, tmp_path / "detr.laconic", steps=QUIET, cache=cache).artifact
    assert artifact.manifest.verdict.failures == []
    verdict = artifact.manifest.verdict
    assert "metric" in verdict.drift[0].figures
    assert {"recall", "precision"} <= {name for each in verdict.information for name in each.figures}
    pipeline = transformers.pipeline("object-detection", str(folder), device="cpu")
    with running(artifact.path) as server, server.client() as client:
        for seed in range(3):
            image, _ = draw(seed)
            sent = {"content": png(image), "headers": {"content-type": "image/png"}}
            (answer,) = client.post("/v1/models/detr/predict", **sent).json()["answers"]
            assert_same(answer["objects"], pipeline(image))
