"""LoRA adapters beside one base, in the engine that is stepped: each row of a batch with its own, as in peft."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import CONTEXT, open_chat_model
from lora_models import make_adapter, write_greedily
from safetensors.torch import load_file, save_file
from test_generator import draw_prompts, finish

from laconic.errors import InputError, SourceError
from laconic.runtimes.adapter_config import CONFIG, WEIGHTS
from laconic.runtimes.generator import GenerationRequest, Generator, Sampling

pytest.importorskip("openvino_genai")
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.openvino_generator import OpenVinoGenerator

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
TOKENS = 16
KINDS: list[dict[str, Any]] = [
    {},
    {"r": 3, "target_modules": "all-linear", "use_rslora": True},
    {
        "target_modules": ["down_proj", "k_proj"],
        "rank_pattern": {"k_proj": 5},
        "alpha_pattern": {"0.mlp.down_proj": 40},
    },
]
"""Settings of adapters: other ranks, layers and scales."""


@pytest.fixture(scope="module")
def adapters(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Path]]:
    """The model's file; the model, and with each adapter; the folders of these."""
    base, artifact = open_chat_model(shared)
    folders = [tmp_path_factory.mktemp("adapter") for _ in KINDS]
    source = artifact.parent / "source"
    models = [
        make_adapter(source, folder, seed, **kind)
        for seed, (folder, kind) in enumerate(zip(folders, KINDS, strict=True))
    ]
    return artifact / "model.onnx", [base, *models], folders


@pytest.fixture(scope="module")
def generator(adapters: tuple[Path, list[Any], list[Path]]) -> Iterator[Generator]:
    with OpenVinoGenerator(adapters[0], context=CONTEXT, cache_bytes=16 << 20, has_adapters=True) as generator:
        assert "stepped" in generator.note
        for number, folder in enumerate(adapters[2], 1):
            generator.load_adapter(number, folder)
        yield generator


def test_rows_with_different_adapters_write_together_what_peft_writes_with_each(
    adapters: tuple[Path, list[Any], list[Path]], generator: Generator
) -> None:
    """20 prompts that begin alike, each with one of the adapters or none; then again behind what the cache has."""
    begin, *ends = draw_prompts(261, [40, *range(1, 21)])
    prompts = [(*begin, *end) for end in ends]
    expected = [write_greedily(adapters[1][n % 4], prompt, TOKENS) for n, prompt in enumerate(prompts)]
    assert write_greedily(adapters[1][0], prompts[1], TOKENS) != expected[1]
    assert len({tuple(text) for text in expected}) > 10
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            generator.add(GenerationRequest(number, prompt, Sampling(TOKENS), adapter=number % 4))
        texts, _ = finish(generator)
        assert [texts[number, 0] for number in range(20)] == expected


def test_the_prefix_cache_tells_adapters_apart(generator: Generator) -> None:
    prompt = draw_prompts(261, [70])[0][::-1]  # which no other test has read
    cached = []
    for number, adapter in enumerate((0, 1, 1, 2, 0)):
        generator.add(GenerationRequest(number, prompt, Sampling(2), adapter=adapter))
        cached += [event.cached_tokens for event in generator.step() if event.cached_tokens is not None]
        finish(generator)
    assert cached == [0, 0, 64, 0, 64]


def test_texts_end_with_an_adapter_that_is_unloaded_meanwhile(
    adapters: tuple[Path, list[Any], list[Path]], generator: Generator
) -> None:
    prompt, other = draw_prompts(261, [20, 9])
    expected = [write_greedily(adapters[1][1], prompt, TOKENS), write_greedily(adapters[1][3], other, TOKENS)]
    generator.load_adapter(4, adapters[2][0])
    generator.add(GenerationRequest(1, prompt, Sampling(TOKENS), adapter=4))
    first = generator.step()[0].token_ids
    generator.unload_adapter(4)
    generator.load_adapter(5, adapters[2][2])
    generator.add(GenerationRequest(2, other, Sampling(TOKENS), adapter=5))
    with pytest.raises(InputError, match="not loaded any more"):
        generator.add(GenerationRequest(3, prompt, Sampling(TOKENS), adapter=4))
    texts, _ = finish(generator)
    assert [[*first, *texts[1, 0]], texts[2, 0]] == expected


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return rewrite


HARMS: dict[str, Callable[[Path], None]] = {
    "has no adapter_model.safetensors": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
    "does not read as safetensors": lambda folder: (folder / WEIGHTS).write_bytes(b"\x08" * 100) and None,
    "peft_type 'IA3'": change_config(peft_type="IA3"),
    "with use_dora, which is not computed beside its base": change_config(use_dora=True),
    "with modules_to_save": change_config(modules_to_save=["lm_head"]),
    "a layer model.model.layers.9": change_weights(
        lambda known: {name.replace("layers.1", "layers.9"): each for name, each in known.items()}
    ),
    "a layer model.lm_head": change_weights(
        lambda known: {name.replace("model.layers.1.self_attn.v_proj", "lm_head"): each for name, each in known.items()}
    ),
    "has 64 inputs and 64 outputs": change_weights(
        lambda known: {
            name: torch.nn.functional.pad(each, (0, 0, 0, 32)) if "lora_B" in name else each
            for name, each in known.items()
        }
    ),
    "is incomplete": change_weights(lambda known: dict(sorted(known.items())[1:])),
    "values that are no numbers": change_weights(lambda known: {name: each / 0 for name, each in known.items()}),
    "holds no tensors": change_weights(lambda _: {}),
    "as I64": change_weights(lambda known: {name: each.long() for name, each in known.items()}),
}
"""What is done to an adapter, by what is said of it."""


@pytest.mark.parametrize("message", HARMS)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    adapters: tuple[Path, list[Any], list[Path]], generator: Generator, tmp_path: Path, message: str
) -> None:
    shutil.copytree(adapters[2][0], tmp_path / "adapter")
    HARMS[message](tmp_path / "adapter")
    with pytest.raises(SourceError, match=message):
        generator.load_adapter(9, tmp_path / "adapter")
    with pytest.raises(InputError, match="not loaded"):
        generator.add(GenerationRequest(1, (3, 4), Sampling(1), adapter=9))
    assert generator.is_idle


def test_weights_in_bfloat16_are_read(
    adapters: tuple[Path, list[Any], list[Path]], generator: Generator, tmp_path: Path
) -> None:
    shutil.copytree(adapters[2][0], tmp_path / "adapter")
    change_weights(lambda known: {name: each.bfloat16() for name, each in known.items()})(tmp_path / "adapter")
    generator.load_adapter(9, tmp_path / "adapter")
    with torch.no_grad():
        for name, parameter in adapters[1][1].named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.bfloat16())
    (prompt,) = draw_prompts(261, [20])
    generator.add(GenerationRequest(1, prompt, Sampling(TOKENS), adapter=9))
    assert finish(generator)[0][1, 0] == write_greedily(adapters[1][1], prompt, TOKENS)


def test_layers_whose_inputs_are_scaled_take_none(
    adapters: tuple[Path, list[Any], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.runtimes.adapter_graph.SCALED", "0.input_layernorm")
    generator = OpenVinoDecoder(adapters[0], context=CONTEXT, cache_bytes=4 << 20, has_adapters=True)
    with generator, pytest.raises(SourceError, match=r"layers\.0\.self_attn\.q_proj, and the served model has none"):
        generator.load_adapter(1, adapters[2][0])


def test_an_engine_that_was_opened_for_none_takes_none(adapters: tuple[Path, list[Any], list[Path]]) -> None:
    generator = OpenVinoDecoder(adapters[0], context=CONTEXT, cache_bytes=4 << 20)
    with generator, pytest.raises(InputError, match="not opened for adapters"):
        generator.load_adapter(1, adapters[2][0])
