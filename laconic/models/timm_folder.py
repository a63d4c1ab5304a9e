"""Models saved by timm, or by transformers as its TimmWrapper: config.json with `architecture` and `pretrained_cfg`.

timm makes the module and reads the weights. It is an optional package, which a server of the artifact does not need.
"""

import importlib
import json
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic import registry
from laconic.errors import SourceError
from laconic.models.image_processor import find_difference
from laconic.models.image_rules import Settings
from laconic.models.model_folder import read_source_json, refuse_pointers
from laconic.models.pretrained import ENCODER, Loaded, WrappedModel
from laconic.models.processors import resolve_task
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.task import Task
from laconic.tensor import BATCH

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
KEPT = ("architecture", "model_args", "pretrained_cfg", "label_names")
"""What of config.json describes the model."""
CLASSIFIER = "AutoModelForImageClassification"
"""What transformers calls the models with a head for classes."""
IMAGENET = 1000
"""The classes of ImageNet-1k, for which a model of timm is unless its config says something else."""


class TimmModel(WrappedModel):
    """pixel_values, [batch, channels, height, width] float32, to [batch, classes], or without a head to the pooled
    features, [batch, width]."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        answer: Tensor = self.model(pixel_values)
        return answer


def is_timm(folder: Path) -> bool:
    """Return whether a folder is of timm, by its config.json."""
    if not (folder / CONFIG).is_file():
        return False
    config = read_source_json(folder / CONFIG)
    return isinstance(config, dict) and isinstance(config.get("architecture"), str) and "pretrained_cfg" in config


def infer_task(folder: Path) -> str:
    """Return the task of a folder: to classify images, or without a head to embed them."""
    return find_task(has_head=read_config(folder)["num_classes"] > 0)


def find_task(*, has_head: bool) -> str:
    """Find the task of models of images with a head for classes, or without one."""
    kind = CLASSIFIER if has_head else ENCODER
    tasks = (resolve_task(name) for name in registry.TASKS)
    return next(each.name for each in tasks if each.auto_class == kind and "images" in each.accepts)


def load(folder: Path, *, task: str | None, labels: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Load a folder of timm.

    task: by default what the head is for. labels: the classes of a new head, drawn from the seed.
    Raises SourceError for a damaged model, one for another task, and one whose images timm prepares in another way;
    MissingPackage without timm.
    """
    source = describe_source(folder, task)
    kind, config = resolve_task(source["task"]), source["config"]
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise SourceError(f"{folder} has no {WEIGHTS[0]}. Copy the folder again, with its weights")
    refuse_pointers(folder)
    model = create(config, folder, weights)
    if labels:
        config = with_classes(config, labels)
    if labels or not kind.has_class_head:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.reset_classifier(len(labels))
    elif not config["num_classes"]:
        raise SourceError(
            f"{folder} has no head (num_classes: 0), and {kind.name} needs one. Choose --task "
            f"{find_task(has_head=False)}, or train a head with laconic finetune --task {kind.name}"
        )
    names = read_labels(config) if kind.has_class_head else ()
    made = kind.from_preprocessing(Preprocessing(image=read_preprocess(folder, model), labels=names))
    module = TimmModel(model)
    check_output(folder, module, made)
    output = "logits" if kind.has_class_head else "embedding"
    return Loaded(module, made, output, {**source, "config": config}, weights.stat().st_size, (weights,))


def describe_source(folder: Path, task: str | None) -> dict[str, Any]:
    """Return how to build the module of a folder. task: by default what its head is for. Raises SourceError."""
    config = read_config(folder)
    name = task or find_task(has_head=config["num_classes"] > 0)
    known = [find_task(has_head=has_head) for has_head in (True, False)]
    if resolve_task(name).name not in known:
        raise SourceError(
            f"{folder} holds the model {config['architecture']} of timm, which is not for the task {name!r}. Expected "
            f"{' or '.join(known)}"
        )
    return {"kind": "timm", "task": name, "config": config}


def read_config(folder: Path) -> dict[str, Any]:
    """Read what of a folder's config.json describes the model, with num_classes for its head. Raises SourceError for
    settings that neither timm nor transformers writes."""
    path = folder / CONFIG
    content = read_source_json(path)
    config = {key: content[key] for key in KEPT if content.get(key) is not None}
    pretrained = config.setdefault("pretrained_cfg", {})
    arguments = config.setdefault("model_args", {})
    count = content.get(
        "num_classes", pretrained.get("num_classes", IMAGENET) if isinstance(pretrained, dict) else None
    )
    if str((content.get("architectures") or [""])[0]).endswith(
        "Model"
    ):  # transformers keeps num_classes without a head
        count, config["model_args"] = 0, {**arguments, "num_classes": 0}
    names = config.get("label_names", [])
    if not (isinstance(pretrained, dict) and isinstance(arguments, dict) and isinstance(names, (list, dict))):
        raise SourceError(f"{path} has settings of other types than timm writes. Copy the model's folder again")
    if not isinstance(count, int) or count < 0 or (count and len(names) > count):
        raise SourceError(
            f"{path} says num_classes: {count}, and names {len(names)} classes. Expected the same number; save the "
            f"model again with save_for_hf"
        )
    return {**config, "num_classes": count}


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the names of the classes by number: those of ImageNet where the weights were trained with it alone, as
    transformers has it; the number where a class has no name."""
    names, count = config.get("label_names"), config["num_classes"]
    if not names and count == IMAGENET and "in1k" in str(config["pretrained_cfg"].get("tag")):
        known = library("timm.data").ImageNetInfo()
        names = [known.index_to_description(number) for number in range(count)]
    by_number = dict(names.items() if isinstance(names, dict) else enumerate(names or ()))
    named = {str(number): str(name) for number, name in by_number.items()}
    return tuple(named.get(str(number), str(number)) for number in range(count))


def with_classes(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Return the config of the same model with a head for these classes."""
    arguments = {**config["model_args"], "num_classes": len(labels)}
    return {**config, "num_classes": len(labels), "label_names": list(labels), "model_args": arguments}


def build(source: Mapping[str, Any]) -> nn.Module:
    """Build the module of a source, with random weights. Raises SourceError, and MissingPackage without timm."""
    model = create(source["config"], None, None)
    if not resolve_task(source["task"]).has_class_head:
        model.reset_classifier(0)
    return TimmModel(model)


def read_input_size(module: Any) -> tuple[int, int, int]:
    """Read channels, height and width of the images that a model takes."""
    channels, height, width = library("timm.data").resolve_data_config({}, model=module.model)["input_size"]
    return channels, height, width


def create(config: Mapping[str, Any], folder: Path | None, weights: Path | None) -> Any:
    """Create the model that a config describes, with the weights in a file, else with random ones. folder: where it is
    from.

    timm reads both from a folder, and so fetches nothing from elsewhere.
    """
    timm, origin = library("timm"), folder or "the model"
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        (Path(place) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        if weights:
            (Path(place) / weights.name).symlink_to(weights.resolve())
        try:
            model = timm.create_model(f"local-dir:{place}", pretrained=weights is not None).eval()
        except Exception as error:  # whatever the settings or a damaged file make of a model
            reason = " ".join(str(error).split())[:300]
            if "Unknown model" in reason:
                raise SourceError(
                    f"timm {timm.__version__} has no model {config['architecture']!r}, so that {origin} cannot be "
                    f"loaded. Install the version that the model was saved with"
                ) from error
            raise SourceError(
                f"timm {timm.__version__} does not load {origin} ({type(error).__name__}: {reason}). Expected the "
                f"complete folder that save_for_hf writes; copy it again"
            ) from error
    if model.num_classes != config["num_classes"]:  # then timm would leave the head random
        raise SourceError(
            f"the config.json of {origin} says num_classes: {config['num_classes']}, and by its model_args there are "
            f"{model.num_classes}. Save the model again with save_for_hf"
        )
    return model


def read_preprocess(folder: Path, model: Any) -> ImagePreprocess:
    """Read the preprocessing of a model, checked against timm's own. Raises SourceError where they differ."""
    data = library("timm.data")
    try:
        settings = data.resolve_data_config({}, model=model)
        made = read_timm(settings)
        transform = data.create_transform(**settings, is_training=False)
    except SourceError as error:
        raise SourceError(f"{folder / CONFIG}: {error}") from None
    except Exception as error:
        raise SourceError(
            f"the pretrained_cfg in {folder / CONFIG} says nothing that timm could prepare images by "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Copy the folder again"
        ) from error
    difference = find_difference(lambda image: transform(image).numpy(), made, converts=False)
    if difference:
        raise SourceError(
            f"the pretrained_cfg in {folder / CONFIG} prepares images by rules that Laconic does not know: "
            f"{difference}. Give the model with --builder, and arrays in .npz, prepared by your own code"
        )
    return made


def check_output(folder: Path, module: nn.Module, task: Task) -> None:
    """Raise SourceError for a model that answers with anything but one vector for each image."""
    with torch.inference_mode():
        (array,) = task.sample_inputs({BATCH: 1}).values()
        try:
            answer = module(torch.from_numpy(array))
        except Exception as error:
            raise SourceError(
                f"the model in {folder} does not take the images that its pretrained_cfg describes, "
                f"{list(array.shape)} ({type(error).__name__}: {' '.join(str(error).split())[:200]}). Save it again "
                f"with save_for_hf"
            ) from error
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        raise SourceError(
            f"the model in {folder} answers with maps or several tensors, and {task.name} needs one vector for each "
            f"image. Give the weights with a --builder for timm:create_model, and samples in .npz"
        )


def library(name: str) -> Any:
    """Import a module of timm. Raises MissingPackage where it is not installed, SourceError where it does not
    import."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise registry.missing_package("timm") from error
    except Exception as error:  # torchvision, which timm imports, is of another build than torch
        raise SourceError(
            f"the model is of timm, which is installed and does not import ({type(error).__name__}: {error}). Install "
            f"the build of torchvision that belongs to torch {torch.__version__}"
        ) from error
    finally:
        logging.disable(level)


FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's filters, by their names in timm."""


def read_timm(settings: Settings) -> ImagePreprocess:
    """Read the preprocessing that `timm.data.create_transform` makes of what `timm.data.resolve_data_config` says: the
    image is resized to 1 / crop_pct of the input, whose centre is cropped.

    crop_mode: `squash` stretches the image, `border` puts a border around it, and `center` cuts off its ends. Raises
    SourceError for an interpolation that is not known here.
    """
    if settings["interpolation"] not in FILTERS:
        raise SourceError(
            f"pretrained_cfg has the interpolation {settings['interpolation']!r}; expected one of {', '.join(FILTERS)}"
        )
    channels, *sides = settings["input_size"]
    height, width = (math.floor(side / settings["crop_pct"]) for side in sides)
    mode = settings["crop_mode"]
    made = ImagePreprocess(
        channels=channels,
        crop=tuple(sides),
        centre="even",
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        resample=FILTERS[settings["interpolation"]],
    )
    if mode not in ("squash", "border") and height == width:
        return made.model_copy(update={"shortest_edge": height})
    fit = {"squash": None, "border": "contain"}.get(mode, "cover")
    fill = tuple(round(255 * value) for value in settings["mean"]) if mode == "border" else (0,)
    return made.model_copy(update={"resize": (height, width), "keep_ratio": fit, "fill": fill})
