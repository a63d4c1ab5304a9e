"""Make a small Llama that has never been trained, and the texts that `laconic finetune` trains it on.

    python benchmarks/docstring_writer.py FOLDER [--megabytes 12] [--vocabulary 4096] [--width 256] [--layers 6]
    laconic finetune FOLDER/untrained --task text-generation --data FOLDER/texts.jsonl --lr 3e-3 \\
        --technique sequence-packing --set steps=700 --set batch_size=8 -o FOLDER/trained

The texts are docstrings of installed packages, those of a module joined; none is of the standard library, which
perplexity.py measures on. The tokenizer is trained on them, too. What quantization costs a model that was trained in
float is measured on it: the weights of SmolLM2, from a file in 4 bits, are on a grid already.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGES = ("torch", "transformers", "sklearn", "scipy", "numpy", "onnx", "onnxscript", "tokenizers", "pandas")
END = "<|end|>"


def main() -> None:
    """Write the checkpoint and the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=12, help="of text, at most")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    texts, size = [], 0
    for text in read_docstrings():
        size += len(text)
        texts.append(text)
        if size > arguments.megabytes * 1e6:
            break
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (arguments.folder / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer(texts, arguments.vocabulary)
    save_model(tokenizer, arguments.width, arguments.layers, arguments.folder / "untrained")
    print(f"{len(texts)} texts, {size / 1e6:.1f} MB")


def read_docstrings() -> Iterator[str]:
    """Yield the docstrings of each module of the packages, joined, of at least 200 letters."""
    root = Path(sysconfig.get_path("purelib"))
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    for path in sorted(paths, key=lambda path: path.stat().st_size):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
        text = "\n".join(doc for doc in docs if doc)
        if len(text) >= 200:
            yield text


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=512
    )


def save_model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int, folder: Path) -> None:
    """Save a Llama with random weights and the tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
