"""Plans of language models: a cache in 8 bits, or with values in 4, which the graph rounds and both engines that write
keep; and matrices in 4 and 8 bits by the divergence of the next token."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from language_models import save
from numpy.typing import NDArray
from test_generator import draw_prompts

from compress.quantize.weight_only import Weights
from export.candidates.engine_option import SENSITIVITY_OPTION, EngineOption
from export.candidates.layer_trials import LayerTrials
from export.candidates.plan_evaluator import PlanEvaluator
from export.candidates.plan_search import PlanTrial, find_plan
from export.placements.openvino_cpu import RULES
from export.placements.place import place
from export.placements.split_decoder import split_decoder
from export.sources import capture_graph
from laconic.arrays import softmax
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, PrecisionLadder
from laconic.recipes.stage import PlanContext
from laconic.runtimes.decoder_session import DecoderSession
from laconic.runtimes.generator import GenerationRequest, Sampling
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.tolerance import Tolerance

pytest.importorskip("openvino_genai")
from laconic.runtimes.openvino_decoder import COPIES, OpenVinoDecoder
from laconic.runtimes.openvino_genai import BLOCK_TOKENS, OpenVinoGenAi

VOCABULARY, SPACE = 40, 128
HEADS, WIDTH, PARTS = 2, 64, 4
"""The cache of the small Llama: heads, the width of a head, keys and values of two layers."""
INT8, FLOAT = PARTS * HEADS * (WIDTH + 8), PARTS * HEADS * WIDTH * 4
INT4 = PARTS // 2 * HEADS * ((WIDTH + 8) + (WIDTH // 2 + 8 * WIDTH // 32))
"""Bytes of a token: with values in 4 bits in groups of 32."""


@dataclass(frozen=True)
class Decoder:
    """A decoder's file, and a session of it."""

    path: Path
    session: DecoderSession

    def read(self, ids: NDArray[np.int64], pieces: tuple[int, ...]) -> Mapping[str, NDArray[np.float32]]:
        """Read a text in pieces: logits of all tokens, and the cache."""
        past, logits, start = self.session.make_empty(1), [], 0
        for piece in pieces:
            places = np.arange(start, start + piece)[None]
            outputs = self.session.decode(ids[:, start : start + piece], places, past)
            past = {name.replace("present", "past"): array for name, array in outputs.items() if "present" in name}
            logits.append(outputs["logits"])
            start += piece
        return {"logits": np.concatenate(logits, axis=1), **past}


@pytest.fixture(scope="module")
def llama(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Graph]:
    """A small Llama and its graph."""
    checkpoint = load_source(save(tmp_path_factory.mktemp("llama"), "wide_llama"), task="text-generation")
    return checkpoint, capture_graph(CheckpointSource.of(checkpoint), Cache(shared / "cache"))


@pytest.fixture(scope="module")
def decoders(llama: tuple[Checkpoint, Graph], tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Decoder]:
    """Decoders with values in 4 bits and keys in 8, with both in 8, and in float, by the bits of values."""
    folder, (_, graph) = tmp_path_factory.mktemp("decoders"), llama
    made = {}
    for bits in (4, 8, 32):
        path = folder / f"{bits}.onnx"
        precision: dict[str, Precision] = {layer.node: "float32" for layer in graph.layers}
        plan = Plan(precision, int8_kv_cache=bits < 32, int4_value_cache=bits == 4)
        place(graph, plan, RULES["float32"], path)
        split_decoder(path)
        made[bits] = Decoder(path, DecoderSession(make_runtime("openvino").open(path), path))
    return made


def round_heads(heads: NDArray[np.float32], bits: int = 8) -> NDArray[np.float32]:
    """Rounded keys or values; in 4 bits each 32 numbers by themselves."""
    numbers = heads.reshape(*heads.shape[:-1], -1, 32 if bits == 4 else heads.shape[-1])
    low, high = numbers.min(-1, keepdims=True), numbers.max(-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return np.asarray(np.round((numbers - low) / scale) * scale + low, np.float32).reshape(heads.shape)


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_are_rounded_as_they_are_added_and_read_rounded(
    decoders: Mapping[int, Decoder], bits: int
) -> None:
    ids = np.array([draw_prompts(VOCABULARY, (50,))[0]])
    rounded, floats = (decoders[each].read(ids, (50,)) for each in (bits, 32))
    for name, kept in (("past.0", 8), ("past.1", bits)):  # the first layer reads nothing that was rounded
        assert rounded[name] == pytest.approx(round_heads(floats[name], kept), abs=1e-5)
    assert rounded["past.0"] != pytest.approx(floats["past.0"], abs=1e-3)
    difference = float(np.abs(rounded["logits"] - floats["logits"]).max())
    assert 1e-3 < difference < 0.1 * np.abs(floats["logits"]).max()
    for pieces in ((1,) * 50, (20, 1, 29)):
        assert decoders[bits].read(ids, pieces)["logits"] == pytest.approx(rounded["logits"], abs=difference / 100)


@pytest.mark.parametrize(("bits", "size"), [(8, INT8), (4, INT4)])
def test_engines_keep_levels_and_write_what_the_session_scores(
    decoders: Mapping[int, Decoder], bits: int, size: int
) -> None:
    """Alone and in a batch, behind prompts of more than a block: log-probabilities are those of the session, which are
    not those with a cache in float."""
    prompts = draw_prompts(VOCABULARY, (70, 5, 33))
    for kind in (OpenVinoGenAi, OpenVinoDecoder):
        with kind(decoders[bits].path, context=SPACE, cache_bytes=1 << 20) as generator:
            copies = COPIES if kind is OpenVinoDecoder else 1
            assert generator.ledger.total == (1 << 20) // (copies * BLOCK_TOKENS * size)
            for number, prompt in enumerate(prompts):
                generator.add(GenerationRequest(number, prompt, Sampling(40, logprobs=True)))
            events = []
            while not generator.is_idle:
                events += generator.step()
        for number, prompt in enumerate(prompts):
            written = [token for event in events if event.request_id == number for token in event.token_ids]
            logprobs = [each for event in events if event.request_id == number for each in event.logprobs]
            ids = np.array([[*prompt, *written]])
            scored, unrounded = (
                np.log(softmax(decoders[each].read(ids, (ids.shape[1],))["logits"]))[0, len(prompt) - 1 : -1]
                for each in (bits, 32)
            )
            chosen = np.arange(len(written)), written
            error = np.abs(scored[chosen] - logprobs).max()
            assert error < 1e-5 < 0.1 * np.abs(unrounded[chosen] - logprobs).max()


def test_matrices_whose_rounding_costs_most_divergence_a_byte_get_8_bits_until_the_goal_is_met(
    llama: tuple[Checkpoint, Graph], decoders: Mapping[int, Decoder], tmp_path: Path
) -> None:
    checkpoint, graph = llama
    task, cache = checkpoint.task, Cache(tmp_path)
    data = make_dataset(task.examples(12, seed=1), task, name="samples")
    reference = predict(decoders[32].session, task, data)
    evaluator = PlanEvaluator(graph, task, cache, tmp_path, {data.fingerprint: reference})
    trials = LayerTrials(evaluator, SENSITIVITY_OPTION, data)
    context = PlanContext(
        task=task, key="", seed=0, folder=tmp_path, cache=cache, steps=Steps(quiet=True), train=data, calibrate=data,
        choose=data, trial=trials,
    )  # fmt: skip
    ladder = Weights(bits=4, group_size=16, mixed_precision=True).plan(graph, context)
    lowest, highest = (ladder.rungs[0][place] for place in (0, -1))

    def try_plan(plan: Plan) -> PlanTrial:
        return evaluator.try_plan(plan, EngineOption("openvino", "float32"), data)

    ends = [try_plan(plan).divergence for plan in (lowest, highest)]
    assert ends[1] < 0.1 * ends[0]
    limit = 0.3 * ends[0]
    plan, trial, is_met = find_plan(ladder, try_plan, Tolerance(mean=0.0, slack=0.0, max_divergence=limit))
    assert is_met
    assert trial.divergence <= limit
    raised = {node for node, precision in plan.precision.items() if precision != lowest.precision[node]}
    costs = {layer.node: ladder.sensitivity[layer.node] / layer.parameters for layer in graph.layers}
    kept = {node for node, precision in plan.precision.items() if precision == "int4-weight"}
    assert min(map(costs.__getitem__, raised)) >= max(map(costs.__getitem__, kept))
    assert {plan.weights[node, "int8-weight"].group_size for node in raised} == {16}
    layer = max(raised, key=costs.__getitem__)
    alone = replace(lowest, precision=dict.fromkeys(lowest.precision, "float32") | {layer: "int4-weight"})
    whole = evaluator.try_plan(alone, SENSITIVITY_OPTION, data).divergence
    assert ladder.sensitivity[layer] == pytest.approx(whole, rel=1e-2), "a part of the graph gives what the whole does"


def test_a_ladder_tries_each_rung_with_a_cache_in_fewer_bits_first() -> None:
    low, high = Plan({"layer": "int4-weight"}), Plan({"layer": "int8-weight"})
    ladder = PrecisionLadder(((low, high), (high,))).with_rounded_cache()
    tried = [[(plan.precision["layer"], plan.int8_kv_cache) for plan in rung] for rung in ladder.rungs]
    assert tried == [
        [("int4-weight", True), ("int8-weight", True)],
        [("int4-weight", False), ("int8-weight", False)],
        [("int8-weight", True)],
        [("int8-weight", False)],
    ]
    ladder = PrecisionLadder(((low,),)).with_rounded_cache(int8=True, int4_values=True)
    kept = [[(plan.int8_kv_cache, plan.int4_value_cache) for plan in rung] for rung in ladder.rungs]
    assert kept == [[(True, True)], [(True, False)], [(False, False)]]
    assert [plan.int8_kv_cache for plan in ladder.keep_in_float(["layer"]).rungs[0][:1]] == [True]
