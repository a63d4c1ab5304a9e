"""Ranks that compute parts of layers, or some of them, learn as one process, and so do their snapshots."""

import copy
import json

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from rank_processes import by_two_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from laconic.errors import RecipeError
from laconic.models.language_model import LanguageModel
from laconic.tasks.token_positions import IGNORED
from train.objectives.cross_entropy import TokenCrossEntropy
from train.objectives.next_token import NextToken
from train.parallel.context_parallel import check_model, check_settings
from train.parallel.mesh import Mesh
from train.parallel.pipeline import make_pipeline
from train.parallel.ranks import Ranks, open_ranks
from train.parallel.sequence_shards import find_blocks
from train.parallel.tensor_plan import derive_plan, make_plan
from train.run_snapshot import resume, save_snapshot
from train.settings import Training
from train.snapshots.snapshot import Snapshots
from train.step.objective import TARGETS
from train.step.sparsity_masks import mask_weights
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
WORDS, ROWS, LENGTH, STEPS, KEPT = 31, 6, 7, 4, 2
"""LENGTH: odd, so that ranks have unequal numbers of positions."""
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 8, "pad_token_id": 0}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "bos_token_id": 0}
MASKS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
CHAINS = {
    2: ("tied", [{"shard": 2}, {"tensor": 2}, {"context": 2}, {}, {"context": 2, "shard": None}]),
    4: (
        "gpt2",
        [{"shard": 4}, {"tensor": 4}, {"pipeline": 2, "shard": 2}, {"pipeline": 2, "tensor": 2}, {"tensor": 2}],
    ),
}
"""By the number of ranks: a model, and the meshes that train it for a step each."""
PARTS = {"gradient-accumulation": {"rows": 1}}


def llama(**changes):
    return LanguageModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes)))


def gpt2():
    """All of attention is one layer, and the head is tied."""
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return LanguageModel(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **still, eos_token_id=0)))


def bert(dropout=0.0, **changes):
    sizes = {**SIZES, **changes, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dict.fromkeys(MASKS, dropout)))


MODELS = {
    "llama": (llama, NextToken),
    "tied": (lambda: llama(tie_word_embeddings=True), NextToken),
    "gpt2": (gpt2, NextToken),
    "bert": (bert, TokenCrossEntropy),
    "deep llama": (lambda: llama(num_hidden_layers=4), NextToken),
    "deep tied": (lambda: llama(num_hidden_layers=4, tie_word_embeddings=True), NextToken),
    "deep bert": (lambda: bert(num_hidden_layers=4), TokenCrossEntropy),
}
ADAPTED = ({"lora": {"rank": 2}}, "gradient-checkpointing", PARTS)
TWO = {"tensor": 2}
POSITIONS = {**TWO, "sequence": True}
RUNS = {
    "tied": ("tied", TWO, (PARTS,)),
    "gpt2, positions": ("gpt2", POSITIONS, ("gradient-checkpointing", PARTS)),
    "bert, positions": ("bert", POSITIONS, ()),
    "llama, adapters": ("llama", TWO, ADAPTED),
    "gpt2, parts of rows": ("gpt2", {"context": 2}, ("gradient-checkpointing", PARTS)),
    "tied, parts of rows": ("tied", {"context": 2}, ({"gradient-accumulation": {"rows": 2}},)),
    "bert, stages": ("deep bert", {"pipeline": 2, "schedule": "zbv"}, ()),
    "tied, bf16": ("tied", TWO, ("bf16", PARTS)),
    "tied, stages": ("deep tied", {"pipeline": 2, "schedule": "interleaved"}, ADAPTED),
}
"""Of two ranks: the model, the mesh and the techniques."""
FOUR = {
    "tied, shards of positions": ("tied", {**POSITIONS, "shard": 2}, (PARTS,)),
    "gpt2, copies": ("gpt2", {"tensor": 2}, ()),
    "llama, shards of parts of rows": ("llama", {"context": 2, "shard": 2}, ADAPTED),
    "tied, four parts of rows": ("tied", {"context": 4}, ({"chunked-cross-entropy": {"chunk": 8}}, PARTS)),
    "tied, stages of heads": ("tied", {"pipeline": 2, "tensor": 2}, ({"gradient-accumulation": {"rows": 3}},)),
    "tied, stages of shards": (
        "deep tied",
        {"pipeline": 2, "shard": 2, "schedule": "interleaved"},
        ("gradient-checkpointing", PARTS),
    ),
    "llama, stages of copies": ("deep llama", {"pipeline": 2, "replicate": 2, "schedule": "zbv"}, ADAPTED),
    "llama, four stages": (
        "deep llama",
        {"pipeline": 4, "schedule": "gpipe"},
        ({"gradient-accumulation": {"rows": 4}},),
    ),
}
"""Of four ranks; the second has two copies, as many as there are ranks for."""


TOLERANCES = {"fp32": (1e-5, 1e-5, 1e-3), "bf16": (1e-3, 2e-2, 1e-2)}
"""Of losses, gradient norms and weights, the last two relative. A number in BF16 is rounded by up to 4e-3 of itself."""


def make_rows(step, rank=0, world=1):
    """Rows of unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH + 1), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    targets = ids[:, 1:].masked_fill(mask == 0, IGNORED)
    batch = {"input_ids": ids[:, :-1] * mask, "attention_mask": mask, TARGETS: targets}
    return {name: tensor[ROWS * rank // world : ROWS * (rank + 1) // world] for name, tensor in batch.items()}


def begin(name, mesh, techniques, ranks, model=None):
    """A run before its first step."""
    make, objective = MODELS[name]
    optimizer = {"adamw": {"lr": 1e-2, "implementation": "fused" if "bert" in name else "foreach"}}
    training = Training(
        mesh=mesh, batch_size=ROWS, techniques=techniques, optimizer=optimizer, max_grad_norm=0.5, steps=STEPS
    )
    torch.manual_seed(0)
    module = model or make()
    torch.manual_seed(1)
    components = training.components()
    pipeline = make_pipeline(training.mesh, ranks, make_rows(0, ranks.data_rank, ranks.data_world))
    axes = {"sharded": training.mesh.is_sharded, "sequence": training.mesh.sequence, "pipeline": pipeline}
    axes |= {"tensor": ranks.select_axes("tensor"), "context": ranks.context}
    parts = make_step_parts(module, objective(None), components, CPU, **axes)
    distribute_step(parts, training, ranks)
    state = parts.assemble()
    state.scheduler = components.schedule.build(state.optimizer, STEPS)
    return state


def learn(state, ranks, losses, norms, stop=STEPS):
    for step in range(len(losses), stop):
        batch = make_rows(step, ranks.data_rank, ranks.data_world)
        losses.append(float(train_step(state, batch, max_grad_norm=0.5)))
        norms.append(float(state.gradient_norm))
        state.scheduler.step()


def prune(model):
    """Half of the weights of a model are zero."""
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.ndim > 1):
            weight.mul_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5)
    return model


def run_chain(rank, folder, name, meshes, world=1):
    """A pruned model, trained for a step on each mesh, which goes on from the snapshot of the one before."""
    torch.manual_seed(0)
    model, losses, norms, source = prune(MODELS[name][0]()), [], [], None
    for number, mesh in enumerate(meshes):
        ranks = Ranks() if world == 1 else Ranks.of(rank, world, CPU, Mesh(**mesh))
        state = begin(name, mesh, (), ranks, copy.deepcopy(model))
        mask = mask_weights(state)
        if source is not None:
            with Snapshots(source) as snapshots:
                losses = resume(state, snapshots, make_rows(0, ranks.data_rank, ranks.data_world))
        assert len(losses) == number
        learn(state, ranks, losses, norms, number + 1)
        mask(number + 1)
        source = folder / f"chain {world} {number}"
        with Snapshots(source) as snapshots:
            save_snapshot(snapshots, state, losses, wait=True)
    trained = state.finish().state_dict()
    zeros = sum(
        int((trained[key] != 0)[value == 0].sum()) for key, value in model.state_dict().items() if value.ndim > 1
    )
    return {"losses": losses, "norms": norms, "lost zeros": zeros}


def finish(state, losses, norms):
    """The figures of a run, and a digest of its weights."""
    module = state.finish()
    weights = {name: float(weight.double().abs().sum()) for name, weight in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def run_each(rank, folder, world, runs):
    """Each run, with a snapshot on the way; the snapshot of one process is gone on with as well."""
    figures = {}
    wanted = json.loads((folder / "runs.json").read_text())
    with open_ranks(CPU, Mesh()):
        for name, run in runs.items():
            if name not in wanted:
                continue
            ranks = Ranks.of(rank, world, CPU, Mesh(**run[1]))
            state, losses, norms = begin(*run, ranks), [], []
            learn(state, ranks, losses, norms, KEPT)
            is_cut = "tensor" in run[1]
            assert not is_cut or all(isinstance(weight, DTensor) for weight in state.module.parameters())
            with Snapshots(folder / name) as snapshots:
                save_snapshot(snapshots, state, losses, wait=True)
            learn(state, ranks, losses, norms)
            figures[name] = finish(state, losses, norms)
            with Snapshots(folder / f"{name} alone") as snapshots:
                state, norms = begin(*run, ranks), []
                losses = resume(state, snapshots, make_rows(0, ranks.data_rank, ranks.data_world))
            assert len(losses) == KEPT
            learn(state, ranks, losses, norms)
            figures[f"{name}, from one"] = finish(state, losses, norms)
        figures["chain"] = run_chain(rank, folder, *CHAINS[world], world)
        if world == 2:
            figures["dropout"] = [run_dropout(rank, world, mesh) for mesh in (TWO, POSITIONS)]
            ranks = Ranks.of(rank, world, CPU, Mesh(context=2))
            figures["evaluation"] = evaluate_rows(begin("tied", {"context": 2}, (), ranks))
            figures["seed"] = ranks.seed_rank
    (folder / f"{world}-{rank}.json").write_text(json.dumps(figures))


def run_dropout(rank, world, mesh):
    """What dropout does to ranks that have the same rows: the masks of attention, and what the ranks have in common."""
    ranks = Ranks.of(rank, world, CPU, Mesh(**mesh))
    model = bert(dropout=0.3)
    seen = []
    for layer in model.bert.encoder.layer:
        layer.attention.output.dense.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    state = begin("bert", mesh, ("gradient-checkpointing",), ranks, model)
    with torch.no_grad():  # the heads of both ranks are alike, so that masks alone tell them apart
        for parameter in model.bert.encoder.parameters():
            local = parameter.to_local()
            local.copy_(torch.full_like(local, 0.01) if local.ndim > 1 else torch.ones_like(local))
    train_step(state, make_rows(0))
    norm = model.bert.embeddings.LayerNorm.weight.to_local()
    return {"attention": [part.sum(-1).flatten().tolist() for part in seen[:1]], "outside": norm.tolist()}


def evaluate_rows(state):
    """The loss of rows, and the tokens behind them."""
    batch, model = make_rows(0), state.module.eval()
    with torch.no_grad():
        loss = float(state.objective.measure(model, batch)["loss"])
    return {"loss": loss, "tokens": model.choose_next(batch["input_ids"], batch["attention_mask"]).tolist()}


def run_two(rank, folder):
    run_each(rank, folder, 2, RUNS)


def run_four(rank, folder):
    run_each(rank, folder, 4, FOUR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def names(request):
    """The runs of the tests that were chosen."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return [name for name in RUNS | FOUR if name in chosen]


@pytest.fixture(scope="module")
def alone(folder, names):
    """Each run on one process, with a snapshot on the way."""
    figures = {}
    (folder / "runs.json").write_text(json.dumps(names))
    for name in names:
        model, _, techniques = (RUNS | FOUR)[name]
        state, losses, norms = begin(model, {}, techniques, Ranks()), [], []
        learn(state, Ranks(), losses, norms, KEPT)
        with Snapshots(folder / f"{name} alone") as snapshots:
            save_snapshot(snapshots, state, losses, wait=True)
        learn(state, Ranks(), losses, norms)
        figures[name] = finish(state, losses, norms)
    return figures


@pytest.fixture(scope="module")
def together(folder, alone):
    with pytest.MonkeyPatch.context() as patch:
        assert by_two_ranks(run_two, folder, patch) == [0] * 2
        assert by_two_ranks(run_four, folder, patch, 4) == [0] * 4
    return {world: [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]
            for world in (2, 4)}  # fmt: skip


@pytest.mark.sweep("gpt2, *", "llama, *", "tied, stages of shards")
@pytest.mark.parametrize("name", [*RUNS, *FOUR])
def test_ranks_with_parts_of_layers_learn_as_one_process(name, together, alone):
    """Norms to 1e-5 of themselves: rounding made 1.2e-5 of one of 3.05 on a processor with AVX2 alone."""
    loss, norm, weight = TOLERANCES["bf16" if "bf16" in name else "fp32"]
    for figures in together[2 if name in RUNS else 4]:
        expected = alone[name]
        assert figures[name]["losses"] == pytest.approx(expected["losses"], abs=loss)
        assert figures[name]["norms"] == pytest.approx(expected["norms"], rel=norm)
        assert figures[name]["weights"] == pytest.approx(expected["weights"], rel=weight, abs=1e-4)
        resumed = figures[f"{name}, from one"]
        assert resumed["losses"] == pytest.approx(expected["losses"], abs=loss)
        assert resumed["norms"] == pytest.approx(expected["norms"][KEPT:], rel=norm)


@pytest.mark.sweep("gpt2, *", "llama, *", "tied, stages of shards")
@pytest.mark.parametrize("name", [*RUNS, *FOUR])
def test_one_process_goes_on_with_a_snapshot_of_parts_of_layers(name, together, alone, folder):
    model, _, techniques = (RUNS | FOUR)[name]
    state = begin(model, {}, techniques, Ranks())
    with Snapshots(folder / name) as snapshots:
        losses = resume(state, snapshots, make_rows(0))
    assert len(losses) == KEPT
    learn(state, Ranks(), losses, [])
    assert losses == pytest.approx(alone[name]["losses"], abs=TOLERANCES["bf16" if "bf16" in name else "fp32"][0])


@pytest.mark.parametrize("world", CHAINS)
def test_a_pruned_model_goes_from_mesh_to_mesh_and_keeps_its_zeros(world, together, tmp_path):
    name, meshes = CHAINS[world]
    expected = run_chain(0, tmp_path, name, [{}] * len(meshes))
    for rank in together[world]:
        assert rank["chain"]["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["chain"]["norms"] == pytest.approx(expected["norms"], abs=1e-5)
        assert rank["chain"]["lost zeros"] == expected["lost zeros"] == 0


def test_dropout_is_one_mask_outside_of_heads_and_another_for_each_rank_inside(together):
    for first, second in zip(*(rank["dropout"] for rank in together[2]), strict=True):
        assert first["outside"] == second["outside"]
        assert first["attention"] != second["attention"]


def test_ranks_with_parts_of_rows_evaluate_whole_rows(together):
    expected = evaluate_rows(begin("tied", {}, (), Ranks()))
    for rank in together[2]:
        assert rank["evaluation"]["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert rank["evaluation"]["tokens"] == expected["tokens"]
    assert together[2][0]["seed"] != together[2][1]["seed"], "dropout is another for each position"


def make_phi3():
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    sizes = LLAMA | {"original_max_position_embeddings": LENGTH}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, rope_parameters=scaling))


def make_mamba():
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=WORDS, **sizes))


@pytest.mark.parametrize(
    ("make", "ranks", "message"),
    [
        (lambda: llama().model, 5, "5 ranks have two parts of a row each, and it takes 8 positions"),
        (lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA)), 2, "has sliding_window"),
        (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA)), 2, "layers of sliding_attention"),
        (make_phi3, 2, "depend on the length of the row"),
        (lambda: transformers.BertLMHeadModel(bert().config), 2, "depend on other positions by more than causal"),
        (make_mamba, 2, "layers of linear_attention"),
    ],
)
def test_a_model_whose_rows_cannot_be_spread_is_refused(make, ranks, message):
    def check(model):
        check_settings(model, ranks)
        check_model(model)

    with pytest.raises(RecipeError, match=message):
        check(LanguageModel(make()))


def test_context_is_for_the_next_token():
    with pytest.raises(RecipeError, match="context cannot spread the rows of this model: it is for language"):
        make_step_parts(bert(), TokenCrossEntropy(None), Training().components(), CPU, context=object())


SMALL = {**LLAMA, "head_dim": 4}
FAMILIES = {"Llama": {}, "Qwen3": {}, "Mistral": {}, "Gemma2": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_from_the_structure_is_that_of_the_config(family):
    config = getattr(transformers, f"{family}Config")(**SMALL)
    with torch.device("meta"):
        module = LanguageModel(getattr(transformers, f"{family}ForCausalLM")(config))
    assert derive_plan(module, 2).styles == make_plan(module, 2).styles


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (llama, 4, "tensor: 4 does not divide the 2 key value heads"),
        (gpt2, 3, "tensor: 3 does not divide the 4 attention heads"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, "has no transformer blocks"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(module, size, message):
    with pytest.raises(RecipeError, match=message):
        make_plan(module(), size)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.T5Config(vocab_size=WORDS, d_model=16, num_layers=2, num_heads=4, d_ff=24),
            "has weights of its own",
        ),
        (transformers.MixtralConfig(**LLAMA, num_local_experts=2), "such as experts"),
        (transformers.GemmaConfig(**LLAMA | {"num_hidden_layers": 1}), "and 0 were found"),
    ],
)
def test_a_model_whose_positions_cannot_be_spread_is_refused(config, message):
    with torch.device("meta"):
        module = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        model = module.from_config(config)
    with pytest.raises(RecipeError, match=message):
        find_blocks(model, make_plan(model, 2).styles)


def test_adapters_beside_spread_positions_are_refused():
    model = llama()
    adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model.model)
    with pytest.raises(RecipeError, match="it has adapters"):
        find_blocks(adapted, {})


@pytest.mark.parametrize(("mesh", "name"), [(TWO, "chunked-cross-entropy"), ({"context": 2}, "sequence-packing")])
def test_a_technique_that_needs_whole_layers_or_rows_is_refused(mesh, name):
    training = Training(mesh=mesh, techniques=(name,))
    parts = make_step_parts(llama(), NextToken(None), training.components(), CPU)
    with pytest.raises(RecipeError, match=rf"{name} and mesh \({next(iter(mesh))}\) cannot be combined"):
        distribute_step(parts, training, Ranks(0, 2))
