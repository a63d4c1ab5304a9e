"""The planner: what each combination takes, which one is chosen, and how large a batch may be."""

import functools
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
import transformers
from contexts import Messages

from laconic.cache import VARIABLE
from laconic.errors import RecipeError, SourceError, UntrustedSource, UsageError
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from train.finetune import technique_costs
from train.finetune.advice import copy_structure
from train.finetune.technique_costs import TechniqueCost, leave_out_each, report_costs
from train.offload.memory_accounting import CATEGORIES
from train.planner import device_rates as measuring
from train.planner import memory_plan
from train.planner.combinations import Combination, list_combinations
from train.planner.memory_plan import MemoryPlan, PlanRow, choose_row, find_largest_batch, plan_memory
from train.planner.memory_prediction import HEADROOM
from train.planner.meta_model import MetaModel, open_meta_model
from train.planner.plan_plots import plot_bars, plot_chosen
from train.planner.plan_summary import summarize_plan
from train.planner.prediction import predict
from train.planner.step_cost import StepCost
from train.settings import Training

CPU = torch.device("cpu")
LENGTH, BATCH = 32, 4
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quickly_measured(tmp_path_factory):
    """A machine is measured in no time: roughly, which is enough to plan by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "MATRIX_SIDES", {"cpu": (16, 64)})
        patch.setattr(measuring, "ARRAY_BYTES", {"cpu": (2**12, 2**18)})
        patch.setattr(measuring, "SECONDS", 0.001)
        patch.setattr(measuring, "PARAMETER_SHAPE", (16, 16), raising=False)
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of transformers, of which only the config is there."""
    home = tmp_path_factory.mktemp("configs")
    text = {**models.TEXT, "architectures": ["LlamaForCausalLM"]}
    kinds = {
        "gpt2": transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                        architectures=["GPT2LMHeadModel"]),
        "llama": transformers.LlamaConfig(**text, num_key_value_heads=2),
        "bert": transformers.BertConfig(**{**models.TEXT, "architectures": ["BertForSequenceClassification"]}),
    }  # fmt: skip
    for name, config in kinds.items():
        config.save_pretrained(home / name)
    return home


def subject(folder: Path, kind: str) -> MetaModel:
    return open_meta_model(folder / kind)


def planned(folder: Path, kind: str, memory: int, **changes) -> MemoryPlan:
    training = Training.model_validate({"batch_size": BATCH, **changes})
    return plan_memory(subject(folder, kind), training, length=LENGTH, memory=memory, device=CPU)


@pytest.fixture(scope="module")
def roomy(folder):
    """A plan for which everything fits, with every other combination."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "list_combinations", lambda *given: list_combinations(*given)[::2])
        return planned(folder, "gpt2", 2**30)


@pytest.fixture(params=["half", pytest.param("every", marks=pytest.mark.sweep)])
def plan_with_room(request, folder, roomy):
    return roomy if request.param == "half" else planned(folder, "gpt2", 2**30)


@pytest.mark.sweep
def test_plain_training_comes_first_and_each_legal_combination_adds_up_to_its_peak_to_the_byte(plan_with_room):
    roomy = plan_with_room
    first = roomy.rows[0].combination
    assert first.training.techniques == ()
    assert first.exact
    assert first.whole
    assert roomy.plain is roomy.rows[0]
    names = [row.combination.name for row in roomy.rows]
    assert len(set(names)) == len(names) > 10
    for row in roomy.rows:
        row.combination.training.components()
    for row in roomy.rows:
        assert set(row.prediction.at_peak) == set(CATEGORIES)
        assert sum(row.prediction.at_peak.values()) == pytest.approx(row.prediction.peak, abs=64)
        assert row.prediction.at_peak["parameters"] > 0
    parts = roomy.plain.prediction.at_peak
    assert parts["parameters"] == pytest.approx(4 * roomy.model.parameters, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * roomy.model.parameters, rel=0.01)


def test_what_is_kept_on_the_host_counts_against_what_is_saved_in_all(roomy):
    plain, *others = summarize_plan(roomy)["rows"]
    assert plain["reduction"] == plain["total_reduction"] == 1
    for row in others:
        assert row["total_reduction"] == pytest.approx(plain["peak"] / (row["peak"] + row["host"]))
        assert (row["total_reduction"] < row["reduction"]) == (row["host"] > 0)
    assert any(row["host"] for row in others)


def test_the_baseline_has_the_attention_that_the_model_has_by_default(folder, roomy):
    model = subject(folder, "gpt2")
    plain, fused = (
        predict(model, Training.model_validate({"batch_size": BATCH, "techniques": choice}), LENGTH, roomy.rates).peak
        for choice in ([], ["sdpa"])
    )
    assert plain == fused


def test_the_fastest_that_fits_is_chosen_for_any_memory(roomy):
    for memory in sorted({round(row.need * factor) for row in roomy.rows for factor in (0.99, 1.06)}):
        chosen = choose_row(roomy.rows, memory)
        fitting = [row for row in roomy.rows if row.need <= memory * (1 - HEADROOM)]
        if chosen is None:
            assert not fitting
            continue
        assert chosen in fitting
        whole = [row for row in fitting if row.combination.whole] or fitting
        assert chosen in whole
        assert chosen.prediction.seconds <= 1.03 * min(row.prediction.seconds for row in whole)
        assert chosen.combination.exact or not any(
            row.combination.exact and row.prediction.seconds <= min(each.prediction.seconds for each in whole)
            for row in whole
        )


def test_where_copies_could_not_be_timed_the_host_comes_last(roomy):
    rows = [replace(row, shared=False) for row in roomy.rows]
    for memory in sorted({round(row.need * factor) for row in rows for factor in (0.99, 1.06)}):
        fitting = [row for row in rows if row.fits(memory)]
        whole = [row for row in fitting if row.combination.whole] or fitting
        chosen = choose_row(rows, memory, copy_timed=False)
        assert (chosen is None) == (not fitting)
        if chosen and chosen.prediction.host:
            assert all(row.prediction.host for row in whole), "nothing else fits"


def test_a_plan_for_a_gpu_that_is_not_here_keeps_to_it_where_that_fits(folder, roomy, monkeypatch):
    fastest = {"cost": StepCost()}  # of all, whatever keeps something on the host
    predictions = {
        str(row.combination.training): replace(row.prediction, **(fastest if row.prediction.host else {}))
        for row in roomy.rows
    }
    monkeypatch.setattr(memory_plan, "list_combinations", lambda *given: [row.combination for row in roomy.rows])
    monkeypatch.setattr(memory_plan, "predict_per_device", lambda model, training, *given: predictions[str(training)])
    monkeypatch.setattr(memory_plan, "find_largest_batch", lambda *given: None)
    training = Training.model_validate({"batch_size": BATCH})
    model = subject(folder, "gpt2")
    found = plan_memory(
        model, training, length=LENGTH, memory=2**30, device=CPU, apart=True, rates=roomy.rates, steps=Steps(quiet=True)
    )
    assert any(row.prediction.host for row in found.rows)
    assert found.chosen is not None
    assert found.chosen.prediction.host == 0


def test_the_front_holds_what_nothing_beats(roomy):
    front = roomy.find_pareto_front()
    for one, other in itertools.permutations(front, 2):
        beaten = one.prediction.seconds <= other.prediction.seconds and one.need <= other.need
        assert not beaten or one.combination.whole is not other.combination.whole
    for each in roomy.rows:
        assert any(best.prediction.seconds <= each.prediction.seconds and best.need <= each.need for best in front)


@pytest.mark.sweep("bert")
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_largest_batch_fits_and_one_row_more_does_not(folder, kind):
    given, training, rates = subject(folder, kind), Training(batch_size=BATCH), measuring.measure_rates(CPU)
    plain = row(given, training, rates)
    memory = round(5.5 * plain.need)
    largest = find_largest_batch(given, plain, LENGTH, memory, rates)
    assert largest > 2 * BATCH
    tried = [row(given, training.model_copy(update={"batch_size": rows}), rates) for rows in (largest, largest + 1)]
    assert [each.fits(memory) for each in tried] == [True, False]


def row(given: MetaModel, training: Training, rates) -> PlanRow:
    """These very settings, on a device whose memory is the host's."""
    return PlanRow(Combination(training, whole=True, exact=True), predict(given, training, LENGTH, rates), shared=True)


def test_a_batch_in_parts_has_no_largest_and_one_beyond_all_bounds_is_not_made(folder):
    given, rates = subject(folder, "bert"), measuring.measure_rates(CPU)
    training = Training.model_validate({"batch_size": BATCH, "techniques": [{"gradient-accumulation": {"rows": 1}}]})
    assert find_largest_batch(given, row(given, training, rates), LENGTH, 2**40, rates) is None
    given, training, rates = subject(folder, "llama"), Training(batch_size=BATCH), measuring.measure_rates(CPU)
    before = forget_peak()
    assert find_largest_batch(given, row(given, training, rates), LENGTH, 2**44, rates) > 2**22
    assert resident() - before < 2**30


def resident() -> int:
    """The most bytes that this process has held since the last `forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak() -> int:
    """Let the most bytes that this process has held begin anew (proc_pid_clear_refs(5)). Return what it holds."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident()


def test_what_a_recipe_asks_for_is_among_the_rows_with_its_settings_or_refused_without_a_place_for_it(folder):
    training = Training.model_validate({"batch_size": BATCH,
                                        "techniques": [{"gradient-checkpointing": {"every": 2}}, "pure-bf16"],
                                        "optimizer": {"adamw": {"stochastic_rounding": True}}})  # fmt: skip
    names = [candidate.name for candidate in list_combinations(subject(folder, "bert"), training, CPU)]
    assert names[:2] == ["adamw", "gradient-checkpointing(every=2) + pure-bf16 + adamw"]
    training = Training.model_validate({"techniques": ["chunked-cross-entropy"]})
    with pytest.raises(RecipeError, match="no logits over a vocabulary"):
        list_combinations(subject(folder, "bert"), training, CPU)


@pytest.mark.sweep
def test_a_classifier_and_a_checkpoint_in_memory_are_offered_what_they_have_a_place_for(folder, tmp_path):
    found = list_combinations(subject(folder, "bert"), Training(batch_size=BATCH), CPU)
    names = {named.name for each in found for named in each.training.techniques}
    assert {
        "sdpa",
        "bf16",
        "gradient-checkpointing",
        "gradient-accumulation",
        "layerwise",
        "optimizer-in-backward",
    } <= names
    assert "chunked-cross-entropy" not in names
    checkpoint = load_source(models.save_bert(tmp_path / "bert"))
    given = copy_structure(checkpoint, "bert")
    assert {each.device.type for each in (*given.module.parameters(), *given.module.buffers())} == {"meta"}
    assert all(each.device.type == "cpu" for each in checkpoint.module.parameters())
    found = list_combinations(given, Training(batch_size=BATCH), CPU)
    assert len(found) > 5
    assert predict(given, found[0].training, LENGTH, measuring.measure_rates(CPU)).peak > 0


def save_entities(folder: Path) -> Path:
    return models.save_bert(folder, transformers.BertForTokenClassification)


@pytest.mark.parametrize("save", [save_entities, models.save_segformer, models.save_wav2vec2])
def test_losses_over_the_labelled_positions_of_a_sample_are_simulated(save, tmp_path):
    given = copy_structure(load_source(save(tmp_path)), "model")
    training = Training(batch_size=BATCH)
    long, short = (predict(given, training, length, measuring.measure_rates(CPU)).peak for length in (50, 10))
    assert long >= short > 0


def test_texts_longer_than_the_model_takes_are_refused_and_a_saved_checkpoint_needs_no_weights(folder, tmp_path):
    with pytest.raises(RecipeError, match="bert takes at most 64 tokens, and 65 are asked for"):
        plan_memory(subject(folder, "bert"), Training(), length=65, memory=2**30, device=CPU)
    load_source(models.save_vit(tmp_path / "vit")).save(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    found = open_meta_model(tmp_path / "saved")
    assert (found.name, found.task.name) == ("saved", "image-classification")


@pytest.mark.parametrize(
    ("source", "given", "kind", "longest"),
    [
        ("bert", {}, "text-classification", 64),
        ("bert/config.json", {}, "text-classification", 64),
        ("gpt2", {}, "text-generation", 64),
        ("bert", {"task": "text-embedding"}, "text-embedding", 64),
        ("nothing", {"builder": "models:MobileNet"}, "tensors", None),
        ("nothing", {"builder": "models:Perceptron", "arguments": {"widths": [3, 2]}}, "tensors", None),
    ],
)
def test_a_subject_is_opened_from_whatever_says_what_the_model_is_like(folder, source, given, kind, longest):
    found = open_meta_model(folder / source, **given)
    assert (found.task.name, found.longest) == (kind, longest)
    assert {each.device.type for each in found.module.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("source", "given", "error", "said"),
    [
        ("model.onnx", {}, SourceError, "is an ONNX file: a graph cannot be trained"),
        ("nowhere", {}, SourceError, "has no config.json; expected a folder of transformers"),
        ("n", {"builder": "models:unsigned"}, SourceError, "nothing says which tensors"),
        ("n", {"builder": "models:fail"}, SourceError, "no such luck"),
        ("n", {"builder": "models:Absent"}, SourceError, "Absent"),
        ("foreign", {}, UntrustedSource, "brings its own code"),
    ],
)
def test_what_cannot_be_opened_is_refused(folder, source, given, error, said):
    foreign = folder / "foreign"
    foreign.mkdir(exist_ok=True)
    (foreign / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "code.Model"}}))
    with pytest.raises(error, match=said):
        open_meta_model(folder / source, **given)


@pytest.fixture
def plan(laconic):
    """Run `laconic plan`."""
    return functools.partial(laconic, "plan")


@pytest.fixture
def perceptron(tmp_path):
    """A recipe for a model without repeated layers, for which few combinations are worth a try."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "source: net.pt\nbuilder: models:Perceptron\narguments: {widths: [8, 16, 4]}\n"
        "batch_size: 3\ntechniques: [{gradient-accumulation: {rows: 2}}]\n"
    )
    return tmp_path / "net.pt", "--trust", "--recipe", path


def test_a_plan_is_printed_for_programs_and_drawn(plan, perceptron, tmp_path):
    pictures = ["--picture", tmp_path / "a.svg", "--timeline", tmp_path / "t.svg"]
    code, out, _ = plan(*perceptron, "--memory", "1GiB", "--json", *pictures)
    found = json.loads(out)
    assert code == 0
    assert (found["model"], found["batch"], found["memory"]) == ("Perceptron", 3, 2**30)
    assert found["chosen"] in [each["name"] for each in found["rows"]]
    assert "gradient-accumulation(rows=2) + adamw" in [each["name"] for each in found["rows"]]
    assert next(each for each in found["rows"] if each["name"] == found["chosen"])["fits"]
    for picture in ("a.svg", "t.svg"):
        assert (tmp_path / picture).read_text().startswith("<?xml")


@pytest.mark.sweep("adamw-4bit-True")
@pytest.mark.parametrize(("optimizer", "warned"), [("adamw-4bit", True), ("adamw-8bit", False)])
def test_what_an_optimizer_was_measured_to_lose_is_said(plan, perceptron, optimizer, warned):
    recipe = perceptron[-1]
    recipe.write_text(f"{recipe.read_text()}optimizer: {optimizer}\n")
    _, out, _ = plan(*perceptron, "--memory", "1GiB")
    assert ("was 0.10 behind AdamW" in " ".join(out.split())) == warned
    _, out, _ = plan(*perceptron, "--memory", "1GiB", "--json")
    found = json.loads(out)
    row = next(each for each in found["rows"] if each["name"] == found["chosen"])
    assert ("behind AdamW" in (row["caution"] or "")) == warned


def test_pictures_are_the_same_each_time(roomy, tmp_path, folder):
    for draw, name in ((plot_bars, "bars"), (plot_chosen, "line")):
        for count in (1, 2):
            draw(roomy, tmp_path / f"{name}{count}.svg")
        assert (tmp_path / f"{name}1.svg").read_bytes() == (tmp_path / f"{name}2.svg").read_bytes()
    found = replace(planned_small(folder), chosen=None)
    with pytest.raises(UsageError, match="nothing fits"):
        plot_chosen(found, tmp_path / "t.svg")


def test_where_nothing_fits_the_least_is_named(plan, perceptron):
    code, out, err = plan(*perceptron, "--memory", "1KiB", "--batch", "2")
    assert code == 3
    assert "Nothing fits into" in " ".join(out.split())
    assert err.splitlines()[-1].startswith("laconic: no combination of techniques fits")


def planned_small(folder: Path) -> MemoryPlan:
    given, training, rates = subject(folder, "bert"), Training(batch_size=BATCH), measuring.measure_rates(CPU)
    only = row(given, training, rates)
    return MemoryPlan(given, LENGTH, 2**30, rates, (only,), only, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "lots"], "memory: expected a size"),
        (["--memory", "1GiB", "--seq", "65"], "bert takes at most 64 tokens, and 65 are asked for"),
        (["--memory", "1GiB", "--device", "tpu"], "expected cpu or cuda"),
        (["--memory", "1GiB", "--task", "causal-lm"], "is now called 'text-generation'"),
        (["--memory", "1GiB", "--batch", "0"], "--batch"),
        (["--memory", "1GiB", "--builder", "models"], "expected 'package.module:factory'"),
        (["--memory", "1GiB", "--recipe", "none.yaml"], "there is no recipe none.yaml"),
        (["--memory", "1GiB", "--picture", "a.pdf"], "drawn as .svg or .png, not as 'a.pdf'"),
        (["--memory", "1GiB", "--timeline", "no/such/a.svg"], "there is no folder no/such"),
        ([], "--memory"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence_with_exit_code_2(plan, folder, arguments, said):
    code, out, err = plan(folder / "bert", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("laconic: ")
    assert err.count("\n") == 1
    assert said in err


def test_eight_billion_parameters_are_planned_for_without_a_weight(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    rates, before = measuring.measure_rates(CPU), forget_peak()
    model = open_meta_model(tmp_path)
    plain = predict(model, Training(batch_size=8), 1024, rates).peak
    lean = ["sdpa", "gradient-checkpointing", "chunked-cross-entropy", "bf16", "optimizer-in-backward"]
    training = Training.model_validate({"batch_size": 8, "max_grad_norm": None, "techniques": lean})
    least = predict(model, training, 1024, rates).peak
    assert 8.0e9 < model.parameters < 8.1e9
    assert resident() - before < 300e6
    assert plain > 16 * model.parameters
    assert 12 * model.parameters < least < 0.75 * plain


def test_each_chosen_technique_is_left_out_unless_another_one_requires_it():
    training = Training.model_validate({"techniques": ["sdpa", "layerwise", "host-weights"], "optimizer": "lion"})
    chosen = [each.name for each in training.techniques]
    without = dict(leave_out_each(training, chosen))
    assert list(without) == ["sdpa", "host-weights", "lion"]
    assert [each.name for each in without["host-weights"].techniques] == ["sdpa", "layerwise"]
    assert without["lion"].optimizer.name == "adamw"
    assert list(leave_out_each(training, ["sdpa"])) == [("sdpa", without["sdpa"]), ("lion", without["lion"])]


def test_what_makes_a_step_slower_is_reported_with_what_it_saves(folder, monkeypatch):
    monkeypatch.setattr(technique_costs, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(technique_costs, "SLOWER", 0.0)  # the rates of this test are measured roughly
    training = Training.model_validate({"batch_size": 64, "techniques": ["sdpa", "gradient-checkpointing"]})
    steps = Messages()
    report_costs(training, ["gradient-checkpointing"], subject(folder, "bert"), LENGTH, CPU, steps)
    (report,) = steps.reports
    name, time, memory = re.fullmatch(r"(.*): (.*) times the time of a step, (.*) of its memory", report).groups()
    assert name == "gradient-checkpointing"
    assert float(time) > 0
    assert float(memory) < 0.9
    assert not steps.warnings


def test_what_makes_a_step_slower_and_saves_nothing_is_warned_of_where_it_was_chosen(folder, monkeypatch):
    monkeypatch.setattr(technique_costs, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(technique_costs, "predict_costs", lambda *given: [TechniqueCost("sdpa", 1.5, 1.0)])
    steps = Messages()
    training = Training.model_validate({"techniques": ["sdpa"]})
    report_costs(training, ["sdpa"], subject(folder, "bert"), LENGTH, CPU, steps)
    assert not steps.reports
    assert "sdpa: a step is predicted to take 1.5 times as long with it, and to save no memory" in steps.warnings[0]
    monkeypatch.setattr(technique_costs, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(technique_costs, "predict_costs", lambda *given: pytest.fail("predicted"))
    training = Training.model_validate({"techniques": ["sdpa"]})
    report_costs(training, [], subject(folder, "bert"), LENGTH, CPU, Messages())
