"""Images of training that NVIDIA DALI decodes: their pixels beside Pillow's, their rows, and what is refused."""

import io
import json
import sys
from importlib.util import find_spec

import models
import numpy as np
import pytest
import torch
from artifacts import embedding_task
from PIL import Image

from laconic.data.reader import make_dataset, read
from laconic.errors import DataError, MissingPackage, RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.object_detection import ObjectDetection
from laconic.tensor import TensorSpec
from train.callbacks.callback import Callback, RunLog
from train.data.batch_loader import BatchLoader
from train.data.batch_sampler import BatchSampler
from train.data.dali_images import DaliImages
from train.data.loader_settings import LoaderSettings
from train.finetune.finetune import select_settings
from train.objectives.cross_entropy import CrossEntropy
from train.settings import TrainingRecipe

needs_dali = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.dali") is None, reason="DALI is not installed: the extra dali"
)
CPU = torch.device("cpu")
LARGEST = 5
"""By how much a value of 0 to 255 may differ from Pillow's; 4 is the most in these images."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PREPROCESSES = {
    "stretched": {"resize": (64, 48)},
    "cropped": {"shortest_edge": 64, "crop": (56, 57), "resample": 3, **IMAGENET},
    "beyond": {"shortest_edge": 50, "crop": (63, 61), "fill": (10, 20, 30), "bgr": True, **IMAGENET},
    "grey": {"resize": (60, 64), "resample": 1, "channels": 1},
    "contained": {"resize": (64, 64), "keep_ratio": "contain", "crop": (64, 64), "centre": "even"},
    "as they came": {"crop": (24, 24), **IMAGENET},
}
LEFT = ("transparent", "turned", "turned.png", "few colours")
"""Images that Pillow decodes."""


class StopAt(Callback):
    """Ends a run as Ctrl-C does, after a step."""

    step: int

    def open(self, run):
        log = RunLog()

        def stop(report):
            if report.step == self.step:
                raise KeyboardInterrupt

        log.step = stop
        return log


def draw(width, height):
    """Draw a smooth image, the same each time."""
    coarse = np.random.default_rng(width).integers(0, 256, (height // 10 + 2, width // 10 + 2, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write(image, form, **settings):
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


@pytest.fixture(scope="module")
def files():
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "jpeg": write(draw(300, 200), "JPEG", quality=90),
        "upright": write(draw(120, 333), "PNG"),
        "small": write(draw(31, 27), "JPEG", progressive=True),
        "grey": write(draw(300, 200).convert("L"), "JPEG"),
        "transparent": write(draw(300, 200).convert("RGBA"), "PNG"),
        "turned": write(draw(300, 200), "JPEG", exif=turned),
        "turned.png": write(draw(300, 200), "PNG", exif=turned),
        "few colours": write(draw(300, 200).convert("P"), "PNG"),
    }


def make_task(**preprocess):
    made = ImagePreprocess(**preprocess)
    spec = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", made.channels, *(made.crop or made.resize)))
    return ImageClassification((spec,), preprocess=made, labels=("a", "b"))


def open_dali(task, dataset):
    return DaliImages(task, dataset, device=CPU, threads=2)


@needs_dali
@pytest.mark.parametrize("name", PREPROCESSES)
def test_pixels_are_those_of_the_checkpoint_but_for_what_resizing_interpolates(files, name):
    task = make_task(**PREPROCESSES[name])
    dataset = make_dataset(files.values(), task, labels=["a"] * len(files))
    dali = open_dali(task, dataset)
    largest = {}
    for key, made, expected in zip(files, dali.decode(dataset.samples.sources), dataset.samples, strict=True):
        assert (made.shape, made.dtype) == (expected.shape, np.float32)
        values = np.array(task.preprocess.std)[:, None, None] / task.preprocess.scale
        largest[key] = np.abs((made - expected) * values).max()
    assert dali.describe() == f"{len(files) - len(LEFT)} images by DALI on the CPU, {len(LEFT)} by Pillow"
    assert not any(largest[key] for key in LEFT)
    assert max(largest.values()) < (1e-3 if name == "as they came" else LARGEST)
    assert largest["jpeg"] or name == "as they came"


@needs_dali
def test_samples_with_the_size_that_they_came_with_have_it(files):
    spec = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", 3, "height", "width"))
    task = ObjectDetection((spec,), preprocess=ImagePreprocess(shortest_edge=40, longest_edge=60), labels=("a",))
    dataset = make_dataset(files.values(), task)
    made = open_dali(task, dataset).decode(dataset.samples.sources)
    assert [list(sample["size"]) for sample in made] == [list(sample["size"]) for sample in dataset.samples]
    assert [sample["pixels"].shape for sample in made] == [sample["pixels"].shape for sample in dataset.samples]


@needs_dali
def test_a_step_has_the_same_batch_after_a_start_in_the_middle_and_on_any_number_of_ranks(files):
    task = make_task(resize=(16, 16))
    dataset = make_dataset(list(files.values()) * 3, task, labels=["a", "b"] * 12)

    def load(start=0, rank=0, world=1):
        order = BatchSampler(len(dataset), 5, 7, rank, world)
        settings = LoaderSettings(image_backend="dali")
        images = open_dali(task, dataset)
        with BatchLoader(
            dataset,
            CrossEntropy(task).collate,
            order,
            device="cpu",
            settings=settings,
            start=start,
            stop=8,
            images=images,
        ) as loader:
            return [batch["pixel_values"] for _, batch in loader], loader.report()

    whole, report = load()
    assert report.endswith("no workers, 21 images by DALI on the CPU, 18 by Pillow")
    assert all(map(torch.equal, load(start=3)[0], whole[3:]))
    halves = zip(load(rank=0, world=2)[0], load(rank=1, world=2)[0], strict=True)
    assert all(map(torch.equal, map(torch.cat, halves), whole))


@needs_dali
def test_a_file_that_has_been_damaged_since_it_was_read_is_named_by_its_row(files, tmp_path):
    for number, name in enumerate(("jpeg", "upright", "jpeg")):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number}.jpg").write_bytes(files[name])
    task = make_task(resize=(16, 16))
    dataset = read(tmp_path, task)
    (tmp_path / "a" / "1.jpg").write_bytes(files["upright"][:999])
    loader = BatchLoader(
        dataset,
        CrossEntropy(task).collate,
        BatchSampler(3, 3, 0),
        device="cpu",
        stop=1,
        images=open_dali(task, dataset),
    )
    with pytest.raises(DataError, match=r"row 2: DALI cannot decode an image: .*Fix or remove the row"):
        list(loader)


@pytest.fixture
def tune(laconic, tmp_path, files):
    """Runs `laconic finetune` of a ViT on three images for each class."""
    models.save_vit(tmp_path / "vit")
    for number in range(12):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(write(draw(40 + number, 30), "JPEG"))

    def run(backend, output="tuned", **changes):
        content = {
            "source": str(tmp_path / "vit"),
            "data": str(tmp_path / "images"),
            "batch_size": 4,
            "steps": 6,
            "snapshot_every": 2,
        }
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(json.dumps(content | {"loader": {"image_backend": backend}, "precision": "fp32"} | changes))
        return laconic("finetune", "--trust", "--recipe", recipe, "-o", tmp_path / output, "--json")

    return run


@needs_dali
def test_a_run_that_goes_on_has_the_same_pixels_and_evaluations_keep_those_of_the_checkpoint(tune, tmp_path):
    plain, whole = (json.loads(tune(backend, backend)[1]) for backend in ("pillow", "dali"))
    assert whole["before"] == plain["before"]
    assert whole["losses"] != plain["losses"]
    assert whole["losses"] == pytest.approx(plain["losses"], abs=1e-2)
    assert Checkpoint.load(tmp_path / "dali").history[-1].config["image_backend"] == "dali"
    assert tune("dali", callbacks=[{"test_dali_images:StopAt": {"step": 3}}])[0] == 130
    code, out, err = tune("dali")
    assert "from the snapshot after step 2" in err
    assert (code, json.loads(out)["losses"]) == (0, whole["losses"])


def test_a_run_with_other_pixels_is_another_run():
    made = {
        backend: TrainingRecipe(source="m", data="d", loader={"image_backend": backend})
        for backend in ("pillow", "dali")
    }
    settings = {backend: select_settings(recipe) for backend, recipe in made.items()}
    assert settings["dali"] == settings["pillow"] | {"image_backend": "dali"}


@pytest.mark.parametrize(
    ("task", "samples", "message"),
    [
        (embedding_task(), ["a text"], "dali is for samples that are images, and those of text-embedding are not"),
        (make_task(resize=(4, 4)), [np.zeros((3, 4, 4), np.float32)], "decodes files of images, and some holds arrays"),
        (make_task(resize=(4, 4), resample=4), [write(draw(40, 30), "PNG")], "3 channels and the filter box"),
    ],
)
def test_what_dali_does_not_serve_is_refused_in_a_sentence(task, samples, message):
    with pytest.raises(RecipeError, match=message):
        open_dali(task, make_dataset(samples, task, name="some"))


def test_without_dali_the_command_that_installs_it_is_said(monkeypatch, files):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    task = make_task(resize=(4, 4))
    with pytest.raises(MissingPackage, match=r"pip install 'laconic\[dali\]'"):
        open_dali(task, make_dataset([files["jpeg"]], task))


@pytest.mark.parametrize("other", [{"workers": 2}, {"cache": "memory"}])
def test_threads_of_dali_take_the_place_of_workers_and_caches(other):
    with pytest.raises(ValueError, match="leave workers and cache out"):
        LoaderSettings(image_backend="dali", **other)
