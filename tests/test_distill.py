import copy
import pickle
import signal
from dataclasses import replace

import pytest
import torch
from contexts import torch_context
from models import ResidualNet, save_bert, save_embedder, save_gpt2, save_llama, save_vit
from torch import nn

from compress.distill.distill_stage import last_replaced, pair_layers
from compress.distill.distillation_loss import LossTerms, OutputLoss, record_forward
from compress.distill.distillation_objective import DistillationObjective
from compress.distill.embeddings import EmbeddingDistillation
from compress.distill.features import FeatureDistillation
from compress.distill.heal import Heal
from compress.distill.layer_distillation import LayerwiseDistillation, LayerwiseLoss
from compress.distill.logits import LogitDistillation
from compress.distill.losses import CosineLoss, HiddenStateLoss, SimilarityLoss, SoftTargetLoss
from compress.distill.relations import AttentionRelationLoss, RelationDistillation
from laconic import registry
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.errors import DataError, RecipeError, UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.language_model import cap_logits
from laconic.models.signature import probe_module
from laconic.models.source_loading import load_source
from laconic.recipes.recipe import Recipe
from laconic.tasks.tensors import Tensors
from train.step.objective import to_tensors

QUICK = {"batch_size": 8, "steps": 6, "loader": {"workers": 0}}
MAKERS = {
    "bert": (save_bert, "text-classification"),
    "mini": (save_embedder, None),
    "gpt2": (save_gpt2, "text-generation"),
    "llama": (save_llama, "text-generation"),
    "vit": (save_vit, None),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def originals(home):
    found = {}
    for name, (make, task) in MAKERS.items():
        (home / name).mkdir()
        found[name] = load_source(make(home / name), task=task)
    torch.manual_seed(0)
    module = ResidualNet(width=8)
    found["net"] = Checkpoint.of(
        module,
        Tensors(module.inputs),
        outputs=probe_module(module.eval(), module.inputs),
        source={"kind": "builder", "builder": "models:ResidualNet", "arguments": {"width": 8}},
        size=1,
    )
    return found


def harmed(checkpoint, amount=0.3):
    """The same model with noise on its weights."""
    module = copy.deepcopy(checkpoint.module)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += amount * parameter.std() * noise
    return Checkpoint.of(
        module, checkpoint.task, outputs=checkpoint.outputs, source=checkpoint.source, size=checkpoint.size
    )


def key_of(one):
    return Checkpoint.of(one.module, one.task, outputs=one.outputs, source=one.source, size=one.size).key


@pytest.fixture
def context(home, tmp_path):
    def make(checkpoint, **changes):
        made = torch_context(checkpoint, tmp_path / changes.pop("name", "run"), dataset=changes.pop("dataset", None))
        return replace(made, cache=Cache(home / "cache"), **changes)

    return make


LOSSES = {
    "probabilities": ("bert", lambda: SoftTargetLoss()),
    "probabilities of images": ("vit", lambda: SoftTargetLoss(4.0)),
    "probabilities of tokens": ("gpt2", lambda: SoftTargetLoss()),
    "hidden states": ("mini", lambda: HiddenStateLoss()),
    "projected hidden states": ("vit", lambda: HiddenStateLoss("last", project=True)),
    "relations": ("mini", lambda: AttentionRelationLoss()),
    "relations of one layer for all three": ("gpt2", lambda: AttentionRelationLoss(heads=2, layer=0)),
    "relations of shared keys": ("llama", lambda: AttentionRelationLoss()),
    "vectors": ("mini", lambda: CosineLoss()),
    "similarities": ("mini", lambda: SimilarityLoss()),
    "each layer": ("llama", lambda: LayerwiseLoss()),
    "outputs": ("net", lambda: OutputLoss()),
}


def objective(student, original, imitation):
    task = original.task
    own = registry.resolve("objective", task.objective).of(task) if task.self_supervised else None
    made = DistillationObjective(task, original.module, [imitation], task_objective=own)
    made.prepare(student.module, pair_layers(student.module, original.module, student.history[len(original.history) :]))
    return made


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_zero_for_the_teacher_itself_and_falls_when_learned(originals, name):
    source, imitation = LOSSES[name]
    original = originals[source]
    student = harmed(original)
    taught = objective(student, original, imitation())
    batch = taught.collate(original.task.examples(6, seed=1), None)
    assert float(taught.loss(copy.deepcopy(original.module), batch).detach()) == pytest.approx(0, abs=2e-5)

    module = student.module.requires_grad_(True)
    optimizer = torch.optim.Adam([*module.parameters(), *taught.losses[0].auxiliary.parameters()], lr=2e-3)
    losses = []
    for _ in range(12):
        loss = taught.loss(module, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_in_parts_has_the_sum_of_the_whole(originals, name):
    source, imitation = LOSSES[name]
    taught = objective(harmed(originals[source]), originals[source], imitation())
    batch = taught.collate(originals[source].task.examples(5, seed=2), None)
    module = harmed(originals[source]).module
    whole = taught.loss(module, batch).item()
    if taught.splittable:
        parts = taught.split(batch, 2)
        assert len(parts) == 3
        assert sum(taught.loss(module, part).item() for part in parts) == pytest.approx(whole, rel=1e-3)
        assert sum(taught.count_terms(part) for part in parts) == taught.count_terms(batch)
    else:
        assert name == "similarities"


def test_padding_counts_for_nothing_and_the_tail_for_the_worst_quarter(originals):
    original = originals["mini"]
    taught = objective(harmed(original), original, HiddenStateLoss())
    short, long = "the model", "the model answers about layers and memory while it waits"
    module = harmed(original).module
    alone = float(taught.loss(module, taught.collate([short], None)))
    both = float(taught.loss(module, taught.collate([short, long], None)))
    other = float(taught.loss(module, taught.collate([long], None)))
    assert both == pytest.approx(alone + other, rel=1e-4)
    errors = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert float(LossTerms(mask).sum_errors(errors)) == 2 + 5
    assert float(LossTerms(mask, per_position=True).sum_errors(errors)) == 1 + 3 + 5
    errors = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert float(LossTerms(tail_weight=0.5).sum_errors(errors)) == 36 + 0.5 * 8 * 7.5
    positions = errors.reshape(2, 4)
    assert float(LossTerms(tail_weight=1.0).sum_errors(positions)) == 2.5 + 6.5 + 2 * 6.5
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    found = LossTerms(mask, per_position=True, tail_weight=1.0).sum_errors(positions)
    assert float(found) == 1 + 2 + 3 + 4 + 5 + 6 + 8 * 5.5


def test_an_objective_with_a_tail_compares_the_rows_of_a_batch_and_no_gradient_reaches_the_teacher(originals):
    original = originals["mini"]
    student = harmed(original)
    plain, tail = (
        DistillationObjective(original.task, original.module, [HiddenStateLoss()], tail_weight=weight)
        for weight in (0.0, 1.0)
    )
    pairs = pair_layers(student.module, original.module, student.history[len(original.history) :])
    for each in (plain, tail):
        each.prepare(student.module, pairs)
    assert plain.splittable
    assert not tail.splittable
    batch = plain.collate(original.task.examples(8, seed=2), None)
    assert float(tail.loss(student.module, batch)) > 2 * float(plain.loss(student.module, batch))
    original = copy.deepcopy(originals["mini"].module).requires_grad_(True)
    before = copy.deepcopy(original.state_dict())
    student = harmed(originals["mini"])
    taught = DistillationObjective(originals["mini"].task, original, [HiddenStateLoss(), CosineLoss(), LayerwiseLoss()])
    taught.prepare(student.module, pair_layers(student.module, original))
    taught.loss(student.module.requires_grad_(True), taught.collate(["the model", "answers"], None)).backward()
    assert all(parameter.grad is None for parameter in original.parameters())
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())
    assert not original.training
    assert not any(part._forward_hooks for part in original.modules())
    assert not any(part._forward_hooks for part in student.module.modules())


STAGES = {
    "logits": ("bert", LogitDistillation),
    "logits of tokens": ("gpt2", LogitDistillation),
    "features": ("mini", FeatureDistillation),
    "relations": ("mini", RelationDistillation),
    "embedding": ("mini", EmbeddingDistillation),
    "layerwise": ("mini", LayerwiseDistillation),
    "healing": ("vit", Heal),
    "healing of outputs": ("net", Heal),
}


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_brings_the_student_nearer_and_leaves_what_it_came_from(originals, context, name):
    source, stage = STAGES[name]
    original, student = originals[source], harmed(originals[source])
    keys = key_of(original), key_of(student)
    given = context(original)
    rate, steps = (5e-4, 40) if stage is Heal else (2e-3, 12)
    settings = {"optimizer": {"name": "adamw", "config": {"lr": rate}}, **QUICK, "steps": steps}
    found = stage(**settings).apply(student, given)
    assert given.fidelity(found).mean() > given.fidelity(student).mean()
    assert [record.stage for record in found.history] == [stage.name]
    assert (key_of(original), key_of(student)) == keys
    assert set(found.module.state_dict()) == set(student.module.state_dict())


def test_what_is_learned_beside_the_student_is_not_saved(originals, context, tmp_path):
    found = FeatureDistillation(project=True, **QUICK).apply(harmed(originals["mini"]), context(originals["mini"]))
    found.save(tmp_path / "saved")
    opened = Checkpoint.load(tmp_path / "saved")
    assert opened.key == found.key
    assert set(opened.module.state_dict()) == set(originals["mini"].module.state_dict())


@pytest.mark.sweep("FeatureDistillation")
@pytest.mark.parametrize("stage", [EmbeddingDistillation, FeatureDistillation, Heal])
def test_a_run_that_was_killed_goes_on_and_ends_the_same(originals, context, monkeypatch, stage):
    more = (
        {"project": True} if stage is FeatureDistillation else {"eval_every": 3, "patience": 9} if stage is Heal else {}
    )
    made = stage(**{**QUICK, "steps": 9, "snapshot_every": 2, **more})
    student = harmed(originals["mini"])
    whole = made.apply(student, context(originals["mini"], name="whole"))
    given = context(originals["mini"], name="killed")
    asked = []

    def stop(done):
        asked.append(done)
        if done == 5:
            signal.raise_signal(signal.SIGTERM)

    plain = type(made).train
    monkeypatch.setattr(
        type(made),
        "train",
        lambda self, one, given, callbacks=(), *more: plain(self, one, given, (*callbacks, lambda state: stop), *more),
    )
    with pytest.raises(KeyboardInterrupt):
        made.apply(student, given)
    monkeypatch.undo()
    assert asked == [1, 2, 3, 4, 5]
    again = made.apply(student, given)
    assert again.key == whole.key
    assert again.history[-1].figures == whole.history[-1].figures


TECHNIQUES = {
    "bf16": (Heal, {"techniques": ["bf16"]}),
    "checkpoint": (Heal, {"techniques": ["gradient-checkpointing"]}),
    "checkpoint of attention": (RelationDistillation, {"techniques": ["gradient-checkpointing"]}),
    "accumulate": (FeatureDistillation, {"techniques": [{"gradient-accumulation": {"rows": 3}}]}),
    "in-backward": (EmbeddingDistillation, {"techniques": ["optimizer-in-backward"], "max_grad_norm": None}),
    "offload": (FeatureDistillation, {"techniques": [{"activation-offload": {"min_bytes": 64}}]}),
    "8-bit moments": (EmbeddingDistillation, {"optimizer": "adamw-8bit"}),
    "low-rank adapters": (FeatureDistillation, {"techniques": [{"lora": {"rank": 2}}]}),
    "healing by adapters": (Heal, {"techniques": [{"lora": {"rank": 2}}], "eval_every": 4}),
    "healing by adapters beside 4 bits": (Heal, {"techniques": [{"qlora": {"rank": 2}}], "eval_every": 4}),
    "layers one by one": (EmbeddingDistillation, {"techniques": ["layerwise"]}),
}


@pytest.mark.sweep("healing by adapters beside 4 bits", "offload", "bf16", "8-bit moments")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_it_learns_with_the_memory_techniques(originals, context, name):
    stage, settings = TECHNIQUES[name]
    if settings.get("optimizer") == "adamw-8bit":
        pytest.importorskip("torchao")
    if "adapters" in name:
        pytest.importorskip("peft")
    student, given = harmed(originals["mini"]), context(originals["mini"])
    settings = {"optimizer": {"adamw": {"lr": 2e-3}}} | settings
    found = stage(**{**QUICK, "steps": 12, **settings}).apply(student, given)
    assert found.module.state_dict().keys() == student.module.state_dict().keys()
    if stage is not RelationDistillation:
        assert given.fidelity(found).mean() > given.fidelity(student).mean()


@pytest.mark.parametrize("technique", ["gradient-checkpointing", {"gradient-accumulation": {"rows": 3}}])
def test_exact_techniques_give_the_weights_of_plain_distillation(originals, context, technique):
    settings = {**QUICK, "optimizer": {"sgd": {"lr": 0.05}}, "max_grad_norm": None}
    student = harmed(originals["mini"])
    plain = FeatureDistillation(**settings).apply(student, context(originals["mini"], name="plain"))
    lean = FeatureDistillation(**settings, techniques=[technique]).apply(
        student, context(originals["mini"], name="lean")
    )
    for name, value in plain.module.state_dict().items():
        assert torch.allclose(lean.module.state_dict()[name], value, atol=1e-5), name


def labelled(checkpoint):
    samples = checkpoint.task.examples(24)
    return make_dataset(samples, checkpoint.task, labels=[number % 3 for number in range(24)], name="classes")


def test_labels_have_their_share_in_the_loss_and_must_be_there(originals, context):
    original = originals["bert"]
    data = labelled(original)
    given, student = context(original, dataset=data), harmed(original)
    made = LogitDistillation(label_weight=0.25, **QUICK).objective(student, given, torch.device("cpu"))
    batch = made.collate(list(data.samples), data.labels)
    free = LogitDistillation(**QUICK).objective(student, given, torch.device("cpu"))
    without = free.collate(list(data.samples), data.labels)
    assert "targets" not in without
    own = registry.resolve("objective", "cross-entropy").of(original.task, data)
    expected = 0.75 * float(free.loss(student.module, without)) + 0.25 * float(own.loss(student.module, batch))
    assert float(made.loss(student.module, batch)) == pytest.approx(expected, rel=1e-5)
    found = LogitDistillation(label_weight=0.25, **QUICK).apply(student, given)
    assert found.history[-1].config["label_weight"] == 0.25
    with pytest.raises(DataError, match=r"label_weight: 0\.3 of the loss is for labels, and .* has none"):
        EmbeddingDistillation(label_weight=0.3, **QUICK).apply(originals["mini"], context(originals["mini"]))


@pytest.mark.parametrize("source", ["mini", "gpt2", "net"])
def test_labels_of_every_kind_can_be_mixed_in(originals, context, source):
    original = originals[source]
    data = labelled(original)
    given = context(original, dataset=data)
    found = Heal(label_weight=0.5, **QUICK).apply(harmed(original), given)
    assert found.history[-1].figures["steps"] > 0


WRONG = {
    "features of a network without layers": ("net", FeatureDistillation, {}, "no hidden states to match: ResidualNet"),
    "layers of a network without any": ("net", LayerwiseDistillation, {}, "no layers to train one by one"),
    "relations without attention": ("net", RelationDistillation, {}, "no attention to distil relations from"),
    "relations of a layer that is not there": (
        "mini",
        RelationDistillation,
        {"layer": 2},
        "layer 2 is none of the student's 2",
    ),
    "heads that do not divide the features": (
        "mini",
        RelationDistillation,
        {"heads": 5},
        "5 relation heads do not divide 32 features",
    ),
    "vectors of a classifier": ("net", LogitDistillation, {"max_length": 3}, "max_length is for texts"),
    "logits of vectors": ("mini", LogitDistillation, {}, "distill.logits is for classes"),
    "hidden states that are not kept": ("mini", Heal, {"techniques": ["layerwise"]}, "layerwise keeps nothing of a"),
    "rows that are compared": (
        "mini",
        EmbeddingDistillation,
        {"techniques": ["gradient-accumulation"]},
        "compares the rows of a batch",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_in_a_sentence(originals, context, name):
    source, stage, settings, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        stage(**QUICK, **settings).apply(harmed(originals[source]), context(originals[source]))


def test_a_layer_stands_for_those_behind_it_and_batches_take_no_model_along(originals):
    assert last_replaced([0, 2, 4], 3, 6) == [1, 3, 5]
    assert last_replaced([0, 1, 2, 4, 5], 5, 6) == [0, 1, 3, 4, 5]
    assert last_replaced(range(6), 3, 6) == [1, 3, 5], "nothing is known of which are left"
    assert last_replaced([3], 1, 6) == [5]
    teacher = originals["mini"].module
    student = copy.deepcopy(teacher)
    stack = "encoder.encoder.layer"
    student.encoder.encoder.layer = nn.ModuleList([student.encoder.encoder.layer[1]])
    record = Record(stage="distill.student", config={}, key="", structure={"blocks": [1]})
    (pair,) = pair_layers(student, teacher, [record])
    assert (pair.student, pair.first, pair.last) == (f"{stack}.0", f"{stack}.0", f"{stack}.1")
    taught = objective(harmed(originals["gpt2"]), originals["gpt2"], SoftTargetLoss())
    opened = pickle.loads(pickle.dumps(taught.collate))
    found, expected = opened(["the model"], None), taught.collate(["the model"], None)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def test_probabilities_are_those_of_capped_logits_where_a_language_model_caps_them(originals):
    teacher, student = (copy.deepcopy(originals["gpt2"].module).eval() for _ in range(2))
    with torch.no_grad():
        shape, generator = student.head.weight.shape, torch.Generator().manual_seed(0)
        student.head.weight.add_(torch.randn(shape, generator=generator) * 0.5)
    loss, ids = SoftTargetLoss(1.0), torch.tensor([[5, 6, 7, 8]])
    terms, found = LossTerms(ids > 0, per_position=True, tail_weight=0.0), []
    for cap in (None, 0.2):
        teacher.logit_cap = student.logit_cap = cap
        own, theirs = (record_forward(each, {"input_ids": ids}, ()) for each in (student, teacher))
        found.append(loss.loss(own, theirs, terms))
        logits = [cap_logits(each.head(each.hidden(ids)), cap) for each in (student, teacher)]
        wanted = torch.nn.functional.kl_div(
            logits[0].log_softmax(-1), logits[1].log_softmax(-1), reduction="sum", log_target=True
        )
        torch.testing.assert_close(found[-1], wanted)
    assert found[1] < found[0] / 2


def test_dropout_is_off_and_batch_normalisation_learns_with_techniques_that_are_known(originals, context):
    original = originals["net"]
    student = harmed(original)
    found = Heal(**QUICK, optimizer={"adamw": {"lr": 2e-4}}).apply(student, context(original))
    assert found.history[-1].figures["best step"], "it was worth it"
    assert not torch.equal(found.module.stem_norm.running_mean, student.module.stem_norm.running_mean)
    batch = to_tensors(original.task.typical(2, 8))
    assert torch.equal(found.module(**batch), found.module(**batch))
    with pytest.raises(RecipeError, match="unknown technique"):
        Heal(**QUICK, techniques=["nothing"]).apply(student, context(original, name="other"))
    steps = [{"distill.heal": {"techniques": [{"sdpa": {"float32": "maybe"}}]}}, "quantize.static"]
    with pytest.raises(RecipeError, match=r"distill\.heal: sdpa: float32: .*'maybe'"):
        Recipe.parse({"source": "m", "data": "d.jsonl", "stages": steps}).make_stages()
