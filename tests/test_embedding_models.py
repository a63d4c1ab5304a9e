"""Encoders of images, and models with a tower for texts and one for images: the vectors are those of transformers."""

import base64
import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from models import png
from PIL import Image
from served import running

from export.pipeline import export
from laconic.cache import Cache
from laconic.errors import SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe

QUIET = Steps(quiet=True)
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = WIDTHS | {"image_size": 16, "patch_size": 4}
TOKENS = WIDTHS | {
    "vocab_size": 40,
    "max_position_embeddings": 24,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
TEXTS = ["the model answers", "hello"]
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))


def save_images(folder: Path, model: transformers.PreTrainedModel, **settings: object) -> Path:
    models.randomize(model).save_pretrained(folder)
    size = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    processor = {"image_processor_type": "ViTImageProcessor"} | size | settings
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def save_towers(folder: Path, kind: str) -> Path:
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=TOKENS, vision_config=PATCHES, projection_dim=8)
        crop = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
        save_images(folder, transformers.CLIPModel(config), image_processor_type="CLIPImageProcessor", **crop)
    else:
        config = transformers.SiglipConfig(text_config=TOKENS, vision_config=PATCHES)
        save_images(folder, transformers.SiglipModel(config), image_processor_type="SiglipImageProcessor")
    models.tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "[PAD]", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def embed(checkpoint: Checkpoint, samples: list[object]) -> np.ndarray:
    batch = checkpoint.task.encode([checkpoint.task.parse(sample) for sample in samples])
    with torch.no_grad():
        return checkpoint.module(**{name: torch.from_numpy(array) for name, array in batch.items()}).numpy()


ENCODERS = {
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**PATCHES)),
    "dinov2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**{name: value for name, value in PATCHES.items() if name != "intermediate_size"})
    ),
    "resnet": lambda: transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2
        )
    ),
    "siglip tower": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**PATCHES)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_the_vector_of_an_image_is_the_pooled_output_of_the_pipeline(name, tmp_path):
    folder = save_images(tmp_path / "model", ENCODERS[name]())
    checkpoint = load_source(folder)
    assert checkpoint.task.name == "image-embedding"
    pipe = transformers.pipeline("image-feature-extraction", model=str(folder), device="cpu", pool=True)
    assert embed(checkpoint, [png(IMAGE)]).ravel() == pytest.approx(np.ravel(pipe(IMAGE)), abs=1e-5)
    checkpoint.save(tmp_path / "saved")
    assert load_source(tmp_path / "saved").key == checkpoint.key


def test_without_the_weights_of_a_pooler_the_vector_is_the_first_tokens(tmp_path):
    model = transformers.ViTModel(transformers.ViTConfig(**PATCHES), add_pooling_layer=False)
    checkpoint = load_source(save_images(tmp_path / "model", model))
    pixels = torch.from_numpy(checkpoint.task.encode([checkpoint.task.parse(png(IMAGE))])["pixel_values"])
    expected = checkpoint.module.model(pixels).last_hidden_state[0, 0].detach().numpy()
    assert np.array_equal(embed(checkpoint, [png(IMAGE)])[0], expected)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_each_tower_is_a_model_of_its_own_with_the_vectors_of_the_whole(kind, tmp_path):
    folder = save_towers(tmp_path / "model", kind)
    whole = transformers.AutoModel.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(IMAGE, return_tensors="pt")
    padding = {"padding": True} if kind == "clip" else {"padding": "max_length", "max_length": 24}
    inputs = dict(tokens(TEXTS, return_tensors="pt", **padding))
    if kind == "siglip":  # its texts are padded to one length, and no mask tells the padding
        inputs = {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        texts = whole.get_text_features(**inputs).pooler_output.numpy()
        images = whole.get_image_features(**pixels).pooler_output.numpy()
    text, image = (load_source(folder, task=task) for task in ("text-embedding", "image-embedding"))
    assert embed(text, list(TEXTS)) == pytest.approx(texts, abs=1e-5)
    assert embed(image, [png(IMAGE)]) == pytest.approx(images, abs=1e-5)
    assert text.size + image.size < 1.2 * (folder / "model.safetensors").stat().st_size
    text.save(tmp_path / "saved")
    assert load_source(tmp_path / "saved").key == text.key
    with pytest.raises(SourceError, match=r"two towers, .* Choose one with --task: text-embedding or image-embedding"):
        load_source(folder)


@pytest.mark.parametrize("task", ["text-embedding", "image-embedding"])
def test_a_tower_is_exported_and_served(task, tmp_path):
    folder = save_towers(tmp_path / "model", "clip")
    recipe = Recipe.parse({"source": str(folder), "task": task, "stages": [], "runtimes": ["onnxruntime"]})
    artifact = export(recipe, tmp_path / "m.laconic", steps=QUIET, cache=Cache(tmp_path / "cache")).artifact
    text = task == "text-embedding"
    body = {"text": TEXTS[0]} if text else {"image": base64.b64encode(png(IMAGE)).decode()}
    expected = embed(load_source(folder, task=task), [TEXTS[0] if text else png(IMAGE)])[0]
    with running(artifact.path) as server, server.client() as http:
        (answer,) = http.post("/v1/models/m/predict", json=body).json()["answers"]
    assert answer["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
