"""A tiny LLaVA that has learned to name the colour of a square, or the corner in which it is; and chats about these."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.clip import CLIPImageProcessorPil

SPECIAL = ("<pad>", "</s>", "<s>", "<image>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
CORNERS = ("top left", "top right", "low left", "low right")
QUESTIONS = ("colour", "corner")
SIDE, CONTEXT = 32, 96


def make_byte_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Every byte is a token, behind the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def draw(rng: np.random.Generator) -> tuple[bytes, tuple[str, str]]:
    """An image of a square on dark noise, as PNG; its colour and its corner."""
    colour, corner = str(rng.choice(list(COLOURS))), int(rng.integers(4))
    pixels = rng.integers(0, 90, (SIDE, SIDE, 3))
    top, left = divmod(corner, 2)
    half = SIDE // 2
    pixels[top * half : (top + 1) * half, left * half : (left + 1) * half] = COLOURS[colour]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue(), (colour, CORNERS[corner])


def make_model() -> transformers.LlavaForConditionalGeneration:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE,
        patch_size=SIDE // 2, projection_dim=32,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=3, vision_feature_layer=-1)
    model = transformers.LlavaForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=1, pad_token_id=0, max_new_tokens=16)
    return model


def make_processor() -> transformers.LlavaProcessor:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_byte_tokenizer(), pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        model_max_length=CONTEXT,
    )  # fmt: skip
    image = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return transformers.LlavaProcessor(
        image, tokenizer, patch_size=SIDE // 2, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip


def train(processor: transformers.LlavaProcessor, steps: int = 120) -> transformers.LlavaForConditionalGeneration:
    """Teach a model what it is asked, the same at each call."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model, tokenizer = make_model(), make_byte_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = [draw(rng) for _ in range(256)]
    pixels = processor.image_processor([Image.open(io.BytesIO(file)) for file, _ in drawn], return_tensors="pt")
    for _ in range(steps):
        chosen = rng.integers(0, len(drawn), 32)
        rows, labels = [], []
        for index in chosen:
            question = int(rng.integers(2))
            prompt = tokenizer.encode(f"USER: {'<image>' * 4}{QUESTIONS[question]} ASSISTANT: ").ids
            answer = tokenizer.encode(f"{drawn[index][1][question]}</s>").ids
            rows.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        optimizer.zero_grad()
        model(input_ids=ids, pixel_values=pixels["pixel_values"][chosen], labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def save_image_model(folder: Path) -> Path:
    """The folder that transformers writes of it."""
    processor = make_processor()
    train(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_chats(folder: Path, count: int = 90) -> Path:
    """A file of chats, each about an image of its own beside it."""
    rng = np.random.default_rng(1)
    lines = []
    for number in range(count):
        file, answers = draw(rng)
        (folder / f"{number}.png").write_bytes(file)
        messages = [{"role": "user", "content": QUESTIONS[number % 2]}]
        if number % 3 == 0:
            messages.append({"role": "assistant", "content": answers[number % 2]})
        lines.append(json.dumps({"messages": messages, "image": f"{number}.png"}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path
