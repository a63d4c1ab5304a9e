"""Images of any size in blocks: pixels, positions and answers as transformers', from the folder of a model to the
server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from block_chat_models import (
    CONTEXT,
    PATCH,
    SIDE,
    SIZES,
    encode_as_transformers,
    make_block_model,
    make_tokenizer,
    save_block_model,
)
from PIL import Image
from served import Running, running
from tile_chat_models import ask, draw_squares, export_noise_chats, write_noise_chats
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from export.pipeline import Result, export
from laconic.cache import Cache
from laconic.errors import InputError, SourceError
from laconic.models.frame_settings import read_frames
from laconic.models.huggingface import load
from laconic.models.qwen_vision import split_blocks
from laconic.recipes.recipe import Recipe
from laconic.tasks.image_files import write_png

FAMILIES = ["Qwen2VL", pytest.param("Qwen2_5VL", marks=pytest.mark.sweep)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def result(family: str, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp(family)
    return export_noise_chats(save_block_model(folder / "source", family), folder, cache)


@pytest.fixture(scope="module")
def server(result: Result) -> Iterator[Running]:
    with running(result.artifact.path, threads=1, kv_cache=1 << 20) as server:
        yield server


def test_tower_and_decoder_have_one_verdict(result: Result) -> None:
    placement = result.artifact.manifest.placements[0]
    assert placement.verdict.passed, placement.verdict.describe()


def test_weights_are_rounded_in_tower_and_decoder_and_ignoring_images_fails(cache: Cache, tmp_path: Path) -> None:
    source, chats = save_block_model(tmp_path / "source", "Qwen2VL"), write_noise_chats(tmp_path)
    recipe = {"source": str(source), "data": {"calibrate": str(chats)}, "engine_only": "openvino"}
    stages: dict[str, Any] = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 16, "keep_int8": ["*visual*"]}}
    placements = {}
    for name, stage in stages.items():
        parsed = Recipe.parse(recipe | {"stages": [{"quantize.weights": stage}], "goal": {"fidelity": 0.6}})
        placements[name] = export(parsed, tmp_path / f"{name}.laconic", cache=cache).artifact.manifest.placements[0]
    assert placements["int8"].verdict.passed, placements["int8"].verdict.describe()
    precision = placements["int4"].precision
    assert {kind for name, kind in precision.items() if "visual.blocks" in name} == {"int8-weight"}
    assert precision["model.model.language_model.layers.0.mlp.up_proj/MatMul"] == "int4-weight"
    assert "answers without information (another image)" in placements["int4"].verdict.describe()


@pytest.mark.parametrize("settings", [{}, {"min_pixels": 9 * SIDE**2, "max_pixels": 40 * SIDE**2}])
def test_pixels_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    processor = Qwen2VLImageProcessorPil(**({"size": SIZES, "patch_size": PATCH} | settings))
    processor.save_pretrained(tmp_path)
    frames = read_frames(tmp_path, channels=3)
    shape = SimpleNamespace(patch_size=PATCH, spatial_merge_size=2, temporal_patch_size=2)
    rng = np.random.default_rng(0)
    for height, width in [(1, 1), (1, 200), (200, 1), *rng.integers(1, 20, (60, 2)), *rng.integers(1, 130, (60, 2))]:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = processor(image, return_tensors="np")
        ours = split_blocks(torch.from_numpy(frames.apply(image)), shape).flatten(1)
        np.testing.assert_allclose(ours, expected["pixel_values"], atol=1e-5)
        assert [1, *(2 * side for side in frames.measure(write_png(image)))] == expected["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"patch_size": 2 * PATCH}, r"makes frames of \(16, 16\)"), ({"do_resize": False}, "has no 'shortest_edge'")],
)
def test_blocks_that_the_tower_does_not_read_are_refused(settings: Any, said: str, tmp_path: Path) -> None:
    save_block_model(tmp_path, "Qwen2VL", **settings)
    with pytest.raises(SourceError, match=said):
        load(tmp_path, task=None, trust=False)


def test_answers_beside_each_other_are_those_of_transformers(server: Running, family: str) -> None:
    model, tokenizer, rng = make_block_model(family), make_tokenizer(), np.random.default_rng(5)
    sizes = [(8, 8), (16, 40), (61, 19), (30, 30), (9, 50)]
    asked = []
    for number in range(25):
        files = [draw_squares(rng, sizes[each], 3) for each in rng.integers(0, len(sizes), number % 4)]
        asked.append(("".join(rng.choice(list("abcdef"), 1 + number)), files))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: ask(server, *each[1], question=each[0]).json(), asked))
    texts = set()
    for (question, files), answered in zip(asked, answers, strict=True):
        places = ["<|vision_start|><|image_pad|><|vision_end|>"] * len(files)
        inputs = encode_as_transformers(
            f"USER: {''.join(places[:1])}{question}{''.join(places[1:])} ASSISTANT: ", files
        )
        length = inputs["input_ids"].shape[1]
        written = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, length:]
        assert answered["choices"][0]["message"]["content"] == tokenizer.decode(written, skip_special_tokens=True)
        assert answered["usage"]["prompt_tokens"] == length
        texts.add(answered["choices"][0]["message"]["content"])
    assert len(texts) > 20


def test_more_blocks_than_the_tower_reads_are_refused(result: Result) -> None:
    task = result.artifact.task()
    task.frames = task.frames.model_copy(update={"most": 1 << 30})
    with pytest.raises(InputError, match="5,625 frames, or blocks of patches, and the tower reads at most 4,096"):
        task.measure([write_png(Image.new("RGB", (75 * SIDE, 75 * SIDE)))])
    with pytest.raises(InputError, match="5,625 frames"):
        task.check_values({"pixel_values": np.broadcast_to(np.float32(0), (1, 5625, 3, SIDE, SIDE))})


def test_what_is_no_image_for_the_model_is_refused(server: Running) -> None:
    rng = np.random.default_rng(0)
    image = draw_squares(rng, (30, 30), 3)
    for files, changes, said in (
        ([draw_squares(rng, (1, 201), 3)], {}, "too narrow"),
        ([image[:60]], {}, "not an image that can be read"),
        ([image], {"question": "<|image_pad|>"}, "Leave that token out"),
        ([image] * 12, {}, f"context is {CONTEXT} tokens"),
        ([image], {"kind": "video_url"}, "video"),
    ):
        refused = ask(server, *files, **changes)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"], refused.text
