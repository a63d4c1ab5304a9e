"""Tiny models of random weights that read images of any size in blocks, Qwen2-VL and Qwen2.5-VL; and their chats."""

import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from image_chat_models import make_byte_tokenizer
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PATCH, CONTEXT = 4, 160
SIDE = 2 * PATCH
SPECIAL = ("<pad>", "</s>", "<s>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SIZES = {"shortest_edge": 2 * SIDE**2, "longest_edge": 24 * SIDE**2}


def make_block_model(family: str) -> Any:
    """A model whose answers depend on its images, and on where their blocks are. family: the prefix of its classes."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 256 + len(SPECIAL), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.3}
    if family == "Qwen2VL":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32}
        vision |= {"window_size": 2 * SIDE, "fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{family.replace('Qwen2_5VL', 'Qwen2_5_VL')}Config")(
        text_config=text, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    model = getattr(transformers, f"{family.replace('Qwen2_5VL', 'Qwen2_5_VL')}ForConditionalGeneration")(config)
    for weight in model.model.visual.merger.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    model.generation_config.update(eos_token_id=1, pad_token_id=0, bos_token_id=2, max_new_tokens=12)
    return model.eval()


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_byte_tokenizer(SPECIAL), pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        model_max_length=CONTEXT,
    )  # fmt: skip


def save_block_model(folder: Path, family: str, **settings: Any) -> Path:
    """The folder that transformers writes of it. settings: of its image processor."""
    make_block_model(family).save_pretrained(folder)
    Qwen2VLImageProcessorPil(**({"size": SIZES, "patch_size": PATCH} | settings)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def encode_as_transformers(text: str, files: list[bytes]) -> dict[str, Any]:
    """What transformers' processor, which needs packages for videos, makes of a rendered chat with its images."""
    encoded: dict[str, Any] = {}
    if files:
        processor = Qwen2VLImageProcessorPil(size=SIZES, patch_size=PATCH)
        encoded = dict(processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt"))
        counts = iter(encoded["image_grid_thw"].prod(dim=1) // 4)
        pieces = text.split("<|image_pad|>")
        text = "".join(piece + "<|image_pad|>" * int(next(counts)) for piece in pieces[:-1]) + pieces[-1]
    ids = make_tokenizer()(text, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, **encoded, **({"mm_token_type_ids": (ids == 3).long()} if files else {})}
