"""OpenVINO IR, as the pipeline of OpenVINO GenAI opens it: the graph with its cache as state, and the tokenizer."""

from pathlib import Path

import transformers

from export.formats.quantized_model import QuantizedModel
from export.formats.transformers_folder import write_config
from laconic.runtimes.openvino import ov  # before openvino_tokenizers: keeps openvino's telemetry out
from laconic.runtimes.stateful_graph import make_stateful

import openvino_tokenizers  # isort: skip


def write_openvino(source: QuantizedModel, destination: Path) -> list[str]:
    """Write a folder that `openvino_genai.LLMPipeline` opens, with the weights as the artifact stores them.

    Raises RuntimeFailure for a model whose attention the engine does not page.
    """
    destination.mkdir()
    stateful = make_stateful(source.artifact.model, source.task.max_tokens)
    ov.save_model(stateful.graph, destination / "openvino_model.xml", compress_to_fp16=False)
    write_config(source, destination)
    read = transformers.AutoTokenizer.from_pretrained(destination, local_files_only=True)
    models = openvino_tokenizers.convert_tokenizer(read, with_detokenizer=True)
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(model, destination / f"openvino_{name}.xml")
    return []
