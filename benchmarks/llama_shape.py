"""Write a Llama of 230 million random weights, whose speed generation.py compares with that of other engines.

    python benchmarks/llama_shape.py CHECKPOINT FOLDER

16 layers of width 1024, 16 heads and 4 of keys, an FFN of 2816, and the tokenizer of CHECKPOINT, a folder of a language
model. Its weights say nothing of fidelity.
"""

import shutil
import sys
from pathlib import Path

import torch
import transformers

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
SHARPNESS = 5.0
"""How much larger its embeddings are than at random: else it tells hardly any token from another, and no arithmetic in
INT8 can be shown to keep what it tells."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def main() -> None:
    """Write the folder."""
    source, folder = map(Path, sys.argv[1:])
    original = transformers.AutoConfig.from_pretrained(source)
    ids = {name: getattr(original, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, **HEADS, **ids, max_position_embeddings=2048, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, folder)


if __name__ == "__main__":
    main()
