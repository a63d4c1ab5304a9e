"""Tiny models that learn, for tests of how they are trained."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.models.language_model import disable_packing_detection
from train.offload.host_memory import HostMemory
from train.planner.simulate import fakify, simulate, trace_memory
from train.step.objective import TARGETS, Batch, Objective
from train.step.step_parts import StepParts
from train.step.technique import Technique
from train.step.train_state import TrainState
from train.step.train_step import train_step

WORDS, LENGTH, ROWS = 61, 12, 4
SHAPE = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}


class Classes(Objective):
    """The first output's last axis holds the logits of classes."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def collate(self, samples: Any, labels: Any) -> Batch:
        raise NotImplementedError

    def count_terms(self, batch: Batch) -> int:
        return batch[TARGETS].numel()

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with disable_packing_detection():
            output: Any = module(**{name: tensor for name, tensor in batch.items() if name != TARGETS})
        logits = output if isinstance(output, Tensor) else output.logits
        return cross_entropy(logits.flatten(0, -2).float(), batch[TARGETS].flatten(), reduction="sum")

    def make_example(self, rows: int, length: int) -> Batch:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
        return {"input_ids": ids[:, :-1].clone(), TARGETS: ids[:, 1:].clone()}


def texts() -> Batch:
    """Each token's next."""
    return Classes().make_example(ROWS, LENGTH)


def sentences() -> Batch:
    """A class for each text; one text is shorter."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[2, 7:] = 0
    return {"input_ids": texts()["input_ids"], "attention_mask": mask, TARGETS: torch.arange(ROWS) % 3}


def gpt2(dropout: float = 0.0, **changes: Any) -> nn.Module:
    """A decoder with learned positions and a tied head."""
    settings = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, "bos_token_id": 0, **changes}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=5, n_head=4, n_positions=16, eos_token_id=0, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """A decoder with rotary positions, and a head of its own."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, max_position_embeddings=32))


def qwen() -> nn.Module:
    """A decoder whose layers see the whole text or a window of it, by turns: each gets a mask of its own."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    return transformers.Qwen2ForCausalLM(config)


def bert() -> nn.Module:
    """An encoder with a mask."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SHAPE, **still, intermediate_size=48, max_position_embeddings=16, num_labels=3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt2": (gpt2, texts),
    "llama": (llama, texts),
    "qwen": (qwen, texts),
    "bert": (bert, sentences),
}


def make_state(
    module: nn.Module, techniques: Iterable[Technique] = (), rows: int | None = None, device: str = "cpu"
) -> TrainState:
    """A training state; its AdamW steps as one kernel would, without a second copy of the weights."""
    place = torch.device(device)
    parts = StepParts(
        module=module.train(),
        objective=Classes(),
        make_optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, foreach=False),
        group_parameters=lambda module: [{"params": [each for each in module.parameters() if each.requires_grad]}],
        device=place,
        host=HostMemory(place),
    )
    if rows is not None:
        parts.accumulate_gradients(rows)
    for technique in techniques:
        technique.apply(parts)
    return parts.assemble()


def learn(state: TrainState, batch: Batch, steps: int = 5, clip: float | None = 1.0) -> list[float]:
    """The losses of some steps on one batch."""
    return [float(train_step(state, batch, max_grad_norm=clip)) for _ in range(steps)]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights every time; numbers drawn later are the same too."""
    torch.manual_seed(0)
    return make()


def trained(
    make: Callable[[], nn.Module],
    batch: Batch,
    techniques: Iterable[Technique] = (),
    rows: int | None = None,
    steps: int = 5,
    clip: float | None = 1.0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights learned."""
    state = make_state(build(make), techniques, rows)
    losses = learn(state, batch, steps, clip)
    return losses, state.finish().state_dict()


def assert_same(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    """The same losses and weights."""
    assert found[0] == pytest.approx(wanted[0], abs=1e-5)
    assert list(found[1]) == list(wanted[1])
    for name, weight in wanted[1].items():
        torch.testing.assert_close(found[1][name], weight, atol=1e-3, rtol=0)


def trace_courses(make: Callable[[], nn.Module], batch: Batch, techniques: Iterable[Technique]) -> tuple[Any, Any]:
    """The course of memory, simulated and watched on real tensors."""
    module = build(make)
    twin = copy.deepcopy(module)

    def fake() -> tuple[TrainState, Batch]:
        return make_state(fakify(twin), techniques), {name: torch.empty_like(each) for name, each in batch.items()}

    def real() -> tuple[TrainState, Batch]:
        return make_state(module, techniques), {name: each.clone() for name, each in batch.items()}

    return simulate(fake), trace_memory(real, torch.device("cpu"))
