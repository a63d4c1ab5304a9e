"""Tiny models of random weights that read images in tiles, SmolVLM and Idefics 3; and chats about images of noise."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from image_chat_models import TEMPLATE, make_byte_tokenizer
from PIL import Image
from served import Running
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from export.pipeline import Result, export
from laconic.cache import Cache
from laconic.recipes.recipe import Recipe
from laconic.tasks.image_files import write_png

SIDE, CONTEXT = 16, 128
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = (
    "<pad>", "</s>", "<s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES,
)  # fmt: skip
IMAGE_PROCESSORS = {"SmolVLM": SmolVLMImageProcessorPil, "Idefics3": Idefics3ImageProcessorPil}


def make_tile_model(family: str) -> Any:
    """A model whose answers depend on its images. family: the prefix of its classes."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig(
        vocab_size=256 + len(SPECIAL), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 4, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=3, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    for weight in model.model.connector.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    model.generation_config.update(eos_token_id=1, pad_token_id=0, bos_token_id=2, max_new_tokens=12)
    return model.eval()


def make_tile_processor(family: str, **settings: Any) -> transformers.Idefics3Processor:
    """The processor of either family: SmolVLM's own needs packages for videos, and makes the same of images."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_byte_tokenizer(SPECIAL), pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        model_max_length=CONTEXT,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    image = IMAGE_PROCESSORS[family](**(sizes | settings))
    return transformers.Idefics3Processor(image, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def save_tile_model(folder: Path, family: str, **settings: Any) -> Path:
    """The folder that transformers writes of it. settings: of its image processor."""
    processor = make_tile_processor(family, **settings)
    make_tile_model(family).save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))  # as published ones have it
    return folder


def draw_noise(rng: np.random.Generator) -> bytes:
    """An image of a few large squares of noise, as PNG: lying, upright or square."""
    height, width = ((20, 20), (12, 24), (30, 15))[rng.integers(3)]
    return draw_squares(rng, (width, height), 2)


def draw_squares(rng: np.random.Generator, size: tuple[int, int], count: int) -> bytes:
    """An image of this width and height, as PNG: so many squares of noise along each side."""
    squares = Image.fromarray(rng.integers(0, 256, (count, count, 3), np.uint8))
    return write_png(squares.resize(size, Image.Resampling.NEAREST))


def write_noise_chats(folder: Path, count: int = 90) -> Path:
    """A file of chats, about no image, one or two beside it."""
    rng = np.random.default_rng(1)
    lines = []
    for number in range(count):
        names = [f"{number}.{place}.png" for place in range(min(number % 4, 2))]
        for name in names:
            (folder / name).write_bytes(draw_noise(rng))
        question = "".join(rng.choice(list("abcdef"), 4))
        lines.append(json.dumps({"messages": [{"role": "user", "content": question}], "images": names}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path


def export_noise_chats(source: Path, folder: Path, cache: Cache) -> Result:
    """The artifact, in FP32, of a model that reads such chats."""
    data = {"calibrate": str(write_noise_chats(folder))}
    recipe = {"source": str(source), "data": data, "engine_only": "openvino", "stages": [], "goal": {"fidelity": 0.8}}
    return export(Recipe.parse(recipe), folder / "chats.laconic", cache=cache)


def ask(server: Running, *files: bytes, question: str = "abc", kind: str = "image_url") -> Any:
    """What a server of that artifact answers to a question behind the first image, and before the others."""
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts: list[Any] = [{"type": kind, kind: {"url": url}} for url in urls]
    content = [*parts[:1], {"type": "text", "text": question}, *parts[1:]]
    chat = {"model": "chats", "temperature": 0, "messages": [{"role": "user", "content": content}]}
    with server.client() as http:
        return http.post("/v1/chat/completions", json=chat)
