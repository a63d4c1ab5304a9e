"""LoRA adapters of a small Llama, made by peft, and what peft writes with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers


def make_adapter(source: Path, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Save an adapter that changes what the model writes; return the model with it. settings: of peft's LoraConfig."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]} | settings)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(source), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_A" in name else 0.03)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def write_greedily(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What follows a prompt."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
