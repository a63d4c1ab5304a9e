"""What OpenVINO GenAI does with adapters beside a graph of Laconic, and why adapters are served merged."""

import numpy as np
import peft
import pytest
import torch
import transformers
from chat_models import CONTEXT, COUNT, make_tokenizer, open_chat_model, render

pytest.importorskip("openvino_genai")
from laconic.runtimes.generator import Sampling
from laconic.runtimes.openvino import make_properties, ov
from laconic.runtimes.openvino_genai import make_config, open_pipeline
from laconic.runtimes.stateful_graph import make_stateful

import openvino_genai as genai  # isort: skip

TOKENS, ALPHA, RANK = 24, 16, 8


def make_adapter(source, folder):
    """An adapter that changes what the model writes, and the model with it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(source), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_A" in name else 0.03)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def write_greedily(model, ids):
    for _ in range(TOKENS):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-TOKENS:]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_engine_writes_as_peft_does_with_one_adapter_for_all_requests_alone(shared, tmp_path):
    base, path = open_chat_model(shared)
    model = make_adapter(path.parent / "source", tmp_path)
    prompt = make_tokenizer().encode(render(COUNT)).ids
    adapted, plain = write_greedily(model, prompt), write_greedily(base, prompt)
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
