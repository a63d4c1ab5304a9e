"""Images in tiles: pixels, tokens and answers as transformers', from the folder of a model to the server."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import Running, running
from tile_chat_models import (
    CONTEXT,
    IMAGE_PROCESSORS,
    SIDE,
    ask,
    draw_noise,
    export_noise_chats,
    make_tile_model,
    make_tile_processor,
    save_tile_model,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

from export.pipeline import Result
from laconic.cache import Cache
from laconic.errors import SourceError
from laconic.models.frame_settings import read_frames
from laconic.models.huggingface import load
from laconic.tasks.image_files import write_png
from laconic.tasks.image_frames import ImageFrames
from laconic.tasks.image_preprocess import ImagePreprocess

FAMILIES = ["SmolVLM", pytest.param("Idefics3", marks=pytest.mark.sweep)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def result(family: str, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp(family)
    return export_noise_chats(save_tile_model(folder / "source", family), folder, cache)


@pytest.fixture(scope="module")
def server(result: Result) -> Iterator[Running]:
    with running(result.artifact.path, threads=1, kv_cache=1 << 20) as server:
        yield server


def test_images_in_tiles_are_answered_as_by_transformers(result: Result, server: Running, family: str) -> None:
    verdict = result.artifact.manifest.placements[0].verdict
    assert verdict.passed, verdict.describe()
    figures = {name: value for each in verdict.information for name, value in each.figures.items()}
    assert figures["image_features_cosine"] > 0.99
    assert figures["fidelity_of_null"] < 0.9
    model, processor = make_tile_model(family), make_tile_processor(family)
    rng = np.random.default_rng(5)
    texts = set()
    for count in (0, 1, 1, 1, 2):
        files = [draw_noise(rng) for _ in range(count)]
        shown = [{"type": "image"}] * count
        content = [*shown[:1], {"type": "text", "text": "abc"}, *shown[1:]]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        images = [Image.open(io.BytesIO(file)) for file in files] or None
        inputs = processor(text=text, images=images, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        written = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, length:]
        answered = ask(server, *files).json()
        assert answered["choices"][0]["message"]["content"] == processor.decode(written, skip_special_tokens=True)
        assert answered["usage"]["prompt_tokens"] == length
        texts.add(answered["choices"][0]["message"]["content"])
    assert len(texts) == 5


def test_images_that_fill_the_context_are_refused(server: Running) -> None:
    refused = ask(server, *[draw_noise(np.random.default_rng(0))] * 5)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"the model's context is {CONTEXT} tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", IMAGE_PROCESSORS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_image_splitting": False},
        {"do_resize": False},
        {"size": {"longest_edge": 75}},
    ],
)
def test_tiles_are_those_of_transformers(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    processor = IMAGE_PROCESSORS[kind](**(sizes | settings))
    processor.save_pretrained(tmp_path)
    frames = read_frames(tmp_path, channels=3)
    rng = np.random.default_rng(0)
    for height, width in [(1, 1), (1, 40), (90, 2), *rng.integers(1, 90, (10, 2))]:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = processor([[image]], return_tensors="np", return_row_col_info=True)
        np.testing.assert_allclose(frames.apply(image), expected["pixel_values"][0], atol=1e-5)
        assert frames.measure(write_png(image)) == (expected["rows"][0][0], expected["cols"][0][0])


@pytest.mark.parametrize("size", [(3000, 2000), (17, 5000), (4096, 4097), (9, 9)])
def test_a_long_image_is_no_longer_than_transformers_allows(size: tuple[int, int]) -> None:
    frames = ImageFrames(frame=ImagePreprocess(resize=(SIDE, SIDE)), longest_edge=4999, is_split=True)
    image = np.broadcast_to(np.uint8(0), (3, size[1], size[0]))
    assert frames.scale(size)[::-1] == get_resize_output_image_size(image, 4999)


def test_frames_of_another_size_than_the_towers_are_refused(tmp_path: Path) -> None:
    save_tile_model(tmp_path, "SmolVLM", max_image_size={"longest_edge": 2 * SIDE})
    with pytest.raises(SourceError, match=r"makes frames of \(32, 32\) pixels, and the model reads 16 x 16"):
        load(tmp_path, task=None, trust=False)
