"""What OpenVINO GenAI does with adapters beside a graph of Laconic, and why another engine computes with them."""

import numpy as np
import pytest
from chat_models import CONTEXT, COUNT, make_tokenizer, open_chat_model, render
from lora_models import make_adapter, write_greedily

pytest.importorskip("openvino_genai")
from laconic.runtimes.generator import Sampling
from laconic.runtimes.openvino import make_properties, ov
from laconic.runtimes.openvino_genai import make_config, open_pipeline
from laconic.runtimes.stateful_graph import make_stateful

import openvino_genai as genai  # isort: skip

TOKENS, ALPHA, RANK = 24, 16, 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_engine_writes_as_peft_does_with_one_adapter_for_all_requests_alone(shared, tmp_path):
    base, path = open_chat_model(shared)
    model = make_adapter(path.parent / "source", tmp_path)
    prompt = make_tokenizer().encode(render(COUNT)).ids
    adapted, plain = write_greedily(model, prompt, TOKENS), write_greedily(base, prompt, TOKENS)
    assert adapted != plain
    adapter = genai.Adapter(tmp_path / "adapter_model.safetensors")
    used = genai.AdapterConfig([(adapter, ALPHA / RANK)])
    properties = make_properties(1, "float32") | {"KV_CACHE_PRECISION": "f32", "adapters": genai.AdapterConfig(adapter)}
    stateful = make_stateful(path / "model.onnx", CONTEXT)
    pipeline = open_pipeline(stateful, path / "model.onnx", 16, properties, has_prefix_cache=False)
    tokens = ov.Tensor(np.array([prompt], np.int64))

    def configure(adapters):
        config = make_config(Sampling(max_new_tokens=TOKENS, temperature=0), 0)
        config.adapters = adapters
        return config

    def step(adapters):
        handle = pipeline.add_request(0, tokens, configure(adapters))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        written = []
        while handle.can_read():
            written += [token for output in handle.read().values() for token in output.generated_ids]
        return written

    assert step(used) == plain  # of a request that is stepped the adapter is ignored
    (result,) = pipeline.generate([tokens], [configure(used)])
    assert result.m_generation_ids == [adapted]
    assert step(genai.AdapterConfig()) == adapted
    with pytest.raises(RuntimeError, match="must be the same for all requests"):
        pipeline.generate([tokens, tokens], [configure(used), configure(genai.AdapterConfig())])
