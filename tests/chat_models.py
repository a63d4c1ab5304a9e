"""A small Llama that has learned two answers by heart, its tokens single bytes, and its artifact."""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export.pipeline import export
from laconic.cache import Cache
from laconic.recipes.recipe import Recipe

EMOJI, COUNT = "say 😀", "count"
ANSWERS = {EMOJI: "The cat 😀 sat on 漢字. 🎉 Über!", COUNT: "one two three four five six seven eight nine ten"}
"""What is asked, and what is answered."""
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 256


def make_tokenizer() -> Tokenizer:
    """Every byte is a token, behind the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def render(question: str, answer: str = "") -> str:
    """A chat as the template has it; without an answer, up to where it begins."""
    return f"<|user|>{question}<|end|><|assistant|>{answer}" + ("<|end|>" if answer else "")


def make_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=261, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip


def train() -> transformers.LlamaForCausalLM:
    """Teach a model the answers, the same at each call."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(make_config())
    tokenizer = make_tokenizer()
    rows = [tokenizer.encode(render(*pair)).ids for pair in ANSWERS.items()]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(ids == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def save_chat_model(folder: Path) -> Path:
    """The folder that transformers writes of it."""
    model = train()
    model.generation_config.max_new_tokens = 100
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "pad_token": "<|pad|>", "eos_token": "<|end|>", "chat_template": TEMPLATE, "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@cache
def open_chat_model(root: Path) -> tuple[transformers.LlamaForCausalLM, Path]:
    """The model, and its artifact in FP32; made once in a run by whichever process asks first."""
    folder = root / "chat"
    folder.mkdir(exist_ok=True)
    path = folder / "chat.laconic"
    with FileLock(root / "chat.lock"):
        if not path.exists():
            source = save_chat_model(folder / "source")
            recipe = {"source": str(source), "task": "text-generation", "stages": [], "engine_only": "openvino"}
            export(Recipe.parse(recipe), path, cache=Cache(root / "cache"))
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "source")
    return model.eval(), path
