"""Other engines that write, for generation.py: ONNX Runtime GenAI and llama.cpp, on one thread, greedily."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Prompts = Sequence[tuple[int, ...]]
Measure = Callable[[Prompts], float]
"""From prompts to tokens per second behind the first of every stream."""


def open_onnxruntime_genai(folder: Path, tokens: int) -> Measure:
    """Open a model that onnxruntime_genai.models.builder made; all streams are one batch, its only form.

    `genai_config.json` must name one thread (`session_options.intra_op_num_threads`).
    """
    import onnxruntime_genai  # not among the dependencies

    model = onnxruntime_genai.Model(str(folder))

    def measure(prompts: Prompts) -> float:
        length = len(prompts[0]) + tokens
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(
            max_length=length,
            min_length=length,
            do_sample=False,
            batch_size=len(prompts),
            past_present_share_buffer=True,
        )
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return len(prompts) * (tokens - 1) / (time.perf_counter() - start)

    return measure


def open_llama_cpp(modules: Path, model: Path, tokens: int) -> Measure:
    """Open a GGUF file in llama.cpp. modules: the folder node_modules that holds node-llama-cpp."""
    script = Path(__file__).with_name("llama_cpp.mjs")
    process = subprocess.Popen(
        ["node", script, modules.resolve(), model.resolve()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def measure(prompts: Prompts) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return measure
