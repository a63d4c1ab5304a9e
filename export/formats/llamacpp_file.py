"""The file that llama.cpp reads beside the graph of a language model, with the same integers and scales."""

from pathlib import Path

from export.formats.gguf_file import write_engine_file
from export.formats.module_origin import ModuleOrigin
from export.formats.quantized_model import GraphWeights, QuantizedModule, build_module, read_layers
from laconic.errors import RuntimeFailure
from laconic.quantization.plan import Plan
from laconic.runtimes.decoder_file import gguf_of


def write_llamacpp_file(model: Path, plan: Plan, origin: ModuleOrigin | None) -> None:
    """Write the file beside a graph. plan: that the graph was placed by. Raises RuntimeFailure for what is no language
    model of transformers, and FormatRefused for one whose weights the file cannot hold as they are."""
    module = None if origin is None else build_module(origin.source, origin.history)
    if module is None:
        raise RuntimeFailure("llama.cpp runs language models of transformers alone. Leave out engine_only: llamacpp")
    if plan.int8_kv_cache:
        raise RuntimeFailure("llama.cpp keeps keys and values in FP16. Leave out int8_kv_cache and int4_value_cache")
    layers = read_layers(module, GraphWeights.read(model, plan.precision))
    write_engine_file(QuantizedModule(module, layers), gguf_of(model))
