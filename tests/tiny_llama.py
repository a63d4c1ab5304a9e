"""A small Llama with random weights, and its file for llama.cpp, in FP32."""

from pathlib import Path

import torch
import transformers
from tiny_decoders import VOCABULARY, GreedyWriter

from export.formats.gguf_file import write_engine_file
from export.formats.quantized_model import QuantizedModule
from laconic.models.language_model import LanguageModel

TOKEN_BYTES = 2 * 2 * 1 * 16 * 2
"""Of a token in the cache in FP16: layers, keys and values, heads, their width."""


class TinyLlama(GreedyWriter):
    """Two layers, with a head of keys and values for two heads of queries."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).eval()

    @torch.inference_mode()
    def predict(self, ids: list[int]) -> torch.Tensor:
        """The logits after each token, [tokens, vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits
        return logits[0]


def write_llama(model: torch.nn.Module, path: Path) -> Path:
    """Write a Llama for llama.cpp."""
    write_engine_file(QuantizedModule(LanguageModel(model), {}), path.with_suffix(".gguf"))
    return path
