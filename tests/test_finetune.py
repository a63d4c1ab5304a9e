"""`laconic finetune` as people use it: for each task, with techniques at once, out of memory, and what it refuses."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import digits
import models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from contexts import torch_context
from PIL import Image
from safetensors.torch import load_file

from compress.finetune_stage import Finetune
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.record import Record
from laconic.cache import VARIABLE
from laconic.data.reader import make_dataset
from laconic.errors import DataError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from train.callbacks.journal import read_lines
from train.planner import device_rates as measuring

HERE = Path(__file__).parent
WORDS = ("hello", "world", "a", "b")


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    """One thread, a cache of these tests, and a machine that is measured in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "MATRIX_SIDES", {"cpu": (16, 64)})
        patch.setattr(measuring, "ARRAY_BYTES", {"cpu": (2**12, 2**18)})
        patch.setattr(measuring, "SECONDS", 0.001)
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Sources without dropout, and samples of every kind."""
    folder = tmp_path_factory.mktemp("home")
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models.save_bert(folder / "bert", **still)
    models.save_embedder(folder / "mini")
    models.save_gpt2(folder / "gpt2")
    config = json.loads((folder / "gpt2" / "config.json").read_text())
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    (folder / "gpt2" / "config.json").write_text(json.dumps(config | quiet))
    models.save_vit(folder / "vit")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(40)]
    write(
        folder / "classes.jsonl", [{"text": text, "label": "up" if "a" in text.split() else "down"} for text in texts]
    )
    write(folder / "unlabelled.jsonl", [{"text": text} for text in texts])
    write(folder / "pairs.jsonl", [
        {"text1": one, "text2": other, "score": len({*one.split()} & {*other.split()}) / 4}
        for one, other in zip(texts, reversed(texts), strict=True)
    ])  # fmt: skip
    (folder / "texts.txt").write_text("\n".join(f"{text} a b a b" for text in texts))
    images, labels = digits.samples()
    for number, (image, label) in enumerate(zip(images[:60], labels[:60], strict=True)):
        place = folder / "digits" / str(int(label) % 3)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[0] * 255).astype(np.uint8)).convert("RGB").save(place / f"{number}.png")
    np.savez(folder / "digits.npz", image=images[:200], label=labels[:200])
    torch.manual_seed(0)
    torch.save(digits.DigitsNet().state_dict(), folder / "net.pt")
    return folder


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def tune(laconic, home, tmp_path):
    """Runs `laconic finetune` over a recipe, and gives what it prints for programs."""

    def run(source: str, data: str, output: str = "tuned", *arguments: str, **changes):
        recipe = tmp_path / f"{output}.yaml"
        settings = {"batch_size": 8, "steps": 6, "optimizer": {"adamw": {"lr": 0.01}}, "loader": {"workers": 0}}
        content = {"source": str(home / source), "data": str(home / data), **settings, **changes}
        recipe.write_text(json.dumps(content))
        given = ("--trust", "--recipe", recipe, "-o", tmp_path / output, "--json")
        code, out, err = laconic("finetune", *given, *arguments)
        assert code == 0, err
        assert not (tmp_path / f"{output}.training").exists()
        return json.loads(out)

    return run


TASKS = {
    "text-classification": ("bert", "classes.jsonl", {"task": "text-classification"}),
    "text-embedding": ("mini", "pairs.jsonl", {}),
    "image-classification": ("vit", "digits", {}),
    "tensors": ("net.pt", "digits.npz", {"builder": "digits:DigitsNet", "batch_size": 32}),
    "text-generation": ("gpt2", "texts.txt", {"task": "text-generation"}),
}


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_learned_and_its_checkpoint_opens(tune, home, tmp_path, task):
    source, data, changes = TASKS[task]
    found = tune(source, data, **{"steps": 30, "optimizer": {"adamw": {"lr": 0.003}}, **changes})
    assert (found["task"], found["turned_on"]) == (task, "")
    assert found["checkpoint"] == str(tmp_path / "tuned")
    assert len(found["losses"]) == 30
    assert sum(found["losses"][-7:]) < sum(found["losses"][:7])
    assert found["before"].keys() == found["after"].keys() >= {"loss"}
    opened = Checkpoint.load(tmp_path / "tuned", trust=True)
    assert opened.task.name == task
    assert opened.history[-1].stage == "finetune"
    assert opened.history[-1].figures["loss after"] == found["after"]["loss"]
    assert [line["step"] for line in read_lines(tmp_path / "tuned" / "training" / "train.jsonl")] == list(range(1, 31))


def test_samples_in_parquet_files_and_tar_archives_are_learned_like_any_others(tune, home):
    rows = [json.loads(line) for line in (home / "classes.jsonl").read_text().splitlines()]
    for shard in range(2):
        part = rows[20 * shard : 20 * (shard + 1)]
        pq.write_table(
            pa.table({"text": [row["text"] for row in part], "class": [row["label"] for row in part]}),
            home / f"classes-{shard}.parquet",
            row_group_size=7,
        )
        with tarfile.open(home / f"classes-{shard}.tar", "w") as archive:
            for number, row in enumerate(part):
                for extension, value in {"txt": row["text"], "json": json.dumps({"class": row["label"]})}.items():
                    entry = tarfile.TarInfo(f"{number}.{extension}")
                    entry.size = len(value)
                    archive.addfile(entry, io.BytesIO(value.encode()))
    plain = tune("bert", "classes.jsonl", task="text-classification")
    for kind in ("parquet", "tar"):
        pattern = f"classes-{{0..1}}.{kind}"
        stored = tune("bert", pattern, kind, "--column", "label=class", task="text-classification")
        assert (stored["losses"], stored["after"]) == (plain["losses"], plain["after"])


def test_the_labels_of_the_data_are_those_of_the_result_which_is_trained_further_with_its_history(tune, tmp_path):
    tune("bert", "classes.jsonl", task="text-classification")
    assert Checkpoint.load(tmp_path / "tuned").task.labels == ("down", "up")
    first = tune("bert", "classes.jsonl")
    second = tune(tmp_path / "tuned", "classes.jsonl", "again")
    assert second["before"]["loss"] == pytest.approx(first["after"]["loss"], abs=1e-6)
    assert [record.stage for record in Checkpoint.load(tmp_path / "again").history] == ["finetune", "finetune"]


def test_the_same_command_writes_the_same_bytes_over_what_it_wrote(tune, tmp_path):
    first = tune("vit", "digits")
    bytes_of = {path.name: path.read_bytes() for path in (tmp_path / "tuned").iterdir() if path.is_file()}
    again = tune("vit", "digits")
    assert {path.name: path.read_bytes() for path in (tmp_path / "tuned").iterdir() if path.is_file()} == bytes_of
    assert first["losses"] == again["losses"]


def test_texts_are_learned_in_blocks_and_read_whole_afterwards(tune, tmp_path):
    found = tune("gpt2", "texts.txt", max_length=5)
    (line, *_) = read_lines(tmp_path / "tuned" / "training" / "train.jsonl")
    assert 8 < line["tokens"] <= 8 * 5
    opened = Checkpoint.load(tmp_path / "tuned")
    assert len(opened.task.encode(["a b " * 10])["input_ids"][0]) == 22
    assert found["after"]["loss"] < found["before"]["loss"]


EXACT = {
    "of a language model": (
        "gpt2",
        [
            "sdpa",
            "gradient-checkpointing",
            {"gradient-accumulation": {"rows": 3}},
            {"chunked-cross-entropy": {"chunk": 7}},
        ],
    ),
    "layer by layer": (
        "gpt2",
        [
            {"layerwise": {"rows": 2, "snapshots": 1}},
            {"chunked-cross-entropy": {"defer": True}},
            "optimizer-in-backward",
        ],
    ),
    "from the host": ("gpt2", [{"layerwise": {"snapshots_on": "host"}}, {"host-weights": {"dtype": "fp32"}}]),
    "of a classifier": (
        "bert",
        [
            {"gradient-checkpointing": {"policy": "selective"}},
            {"gradient-accumulation": {"rows": 3}},
            {"activation-offload": {"min_bytes": 64}},
        ],
    ),
}
SAMPLES = {"gpt2": "texts.txt", "bert": "classes.jsonl"}
SGD = {"optimizer": {"sgd": {"lr": 0.05}}}
"""Adam divides by the size of a gradient, and makes of rounding what looks like a difference."""


@pytest.mark.parametrize("case", EXACT)
def test_exact_techniques_together_leave_the_weights_of_plain_training(tune, tmp_path, case):
    source, techniques = EXACT[case]
    changes = SGD | ({"max_grad_norm": None} if "optimizer-in-backward" in techniques else {})
    plain = tune(source, SAMPLES[source], "plain", **changes)
    found = tune(source, SAMPLES[source], "lean", techniques=techniques, **changes)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert found["after"] == pytest.approx(plain["after"], abs=1e-4)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "lean"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "techniques", [["lora", "bf16"], ["pure-bf16"], ["sequence-packing", "sdpa"], ["qlora"]], ids=str
)
def test_inexact_techniques_learn_and_their_checkpoint_opens(tune, tmp_path, techniques):
    pytest.importorskip("peft") if techniques[0] in ("lora", "qlora") else None
    pytest.importorskip("torchao") if techniques[0] == "qlora" else None
    optimizer = {"adamw": {"lr": 0.02, "stochastic_rounding": "pure-bf16" in techniques}}
    found = tune("gpt2", "texts.txt", techniques=techniques, optimizer=optimizer)
    assert found["after"]["loss"] < found["before"]["loss"]
    opened = Checkpoint.load(tmp_path / "tuned")
    assert {parameter.dtype for parameter in opened.module.parameters()} == {torch.float32}


def test_with_a_memory_the_fastest_that_fit_are_turned_on(tune):
    given = {"builder": "digits:DigitsNet", "batch_size": 64}
    plain = tune("net.pt", "digits.npz", memory="1GiB", **given)["turned_on"]
    assert plain.endswith("predicted")
    assert "gradient-accumulation" not in plain
    assert "gradient-accumulation" in tune("net.pt", "digits.npz", memory="320KiB", **given)["turned_on"]


@pytest.fixture
def answers(laconic, home, tmp_path):
    """Compresses a source by these stages, and gives what the artifact makes of the digits."""

    def run(source: Path, goal: dict, *stages: dict, code: int = 0, **changes) -> np.ndarray:
        recipe = tmp_path / "compress.yaml"
        stages = [*stages, {"quantize.static": {"mixed_precision": False}}]
        content = {"source": str(source), "data": str(home / "digits.npz"), "goal": goal,
                   "stages": stages, "runtimes": ["onnxruntime"]}  # fmt: skip
        recipe.write_text(json.dumps(content | changes))
        found, _, err = laconic("compress", "--recipe", recipe, "-o", tmp_path / "art", "--trust")
        assert found == code, err
        with Artifact.load(tmp_path / "art").open() as session:
            return next(iter(session.run({"image": digits.samples()[0][:200]}).values())).argmax(axis=1)

    return run


def test_a_result_goes_straight_into_compression(tune, answers, tmp_path):
    tune("net.pt", "digits.npz", builder="digits:DigitsNet", batch_size=32, steps=40)
    found = answers(tmp_path / "tuned", {"fidelity": 0.9})
    tuned = Checkpoint.load(tmp_path / "tuned", trust=True)
    with torch.no_grad():
        wanted = tuned.module(torch.from_numpy(digits.samples()[0][:200])).argmax(dim=1).numpy()
    assert (found == wanted).mean() > 0.9


def test_training_is_a_stage_of_a_recipe_of_compression(answers, home):
    training = {"steps": 60, "batch_size": 32, "optimizer": {"adamw": {"lr": 0.01}}, "loader": {"workers": 0}}
    # The answers are to be others than those of the model that came: from there on what was trained is the original.
    found = answers(home / "net.pt", {}, {"finetune": training}, builder="digits:DigitsNet")
    assert (found == digits.samples()[1][:200]).mean() > 0.6


def test_two_stages_of_training_are_two_steps_of_the_history_and_need_labels(home, tmp_path):
    checkpoint = load_source(home / "bert")
    data = make_dataset(
        ["a b", "hello", "b a", "world", "a", "b"], checkpoint.task, labels=["yes", "no", "yes", "no", "yes", "maybe"]
    )  # fmt: skip
    given = {"steps": 3, "batch_size": 2, "snapshot_every": 1, "loader": {"workers": 0}}
    stage = Finetune.model_validate(given)
    once = stage.apply(checkpoint, torch_context(checkpoint, tmp_path, dataset=data, key="first"))
    before = {name: value.clone() for name, value in once.module.state_dict().items()}
    twice = stage.apply(once, torch_context(once, tmp_path, dataset=data, key="second"))
    assert len(twice.history) == 2
    assert twice.history[0].key != twice.history[1].key
    assert any(not torch.equal(before[name], value) for name, value in twice.module.state_dict().items())
    assert isinstance(twice.history[1], Record)
    checkpoint = load_source(home / "bert")
    data = make_dataset(["a b", "hello", "b a", "world"], checkpoint.task, name="texts")
    with pytest.raises(DataError, match=r"^the samples have no labels"):
        Finetune().apply(checkpoint, torch_context(checkpoint, tmp_path, dataset=data))


MISTAKES = [
    (["bert", "unlabelled.jsonl"], "task: text-classification", "has no labels to learn from"),
    (["bert", "empty.jsonl"], "", "empty.jsonl"),
    (["bert", "one.jsonl"], "", "nothing to tell apart"),
    (["gpt2", "one.txt"], "", "at least 2 are needed"),
    (["mini", "texts.txt"], "", "Give each row a 'label', or pairs as 'text1' and 'text2'"),
    (["bert", "missing.jsonl"], "", "there is no"),
    (["absent", "classes.jsonl"], "", "does not exist"),
    (["bert", "classes.jsonl"], "techniques: [gradient-chekpointing]", "Did you mean 'gradient-checkpointing'?"),
    (["bert", "classes.jsonl"], "techniques: [optimizer-in-backward]", "Set max_grad_norm: null"),
    (
        ["bert", "classes.jsonl"],
        "techniques: [optimizer-in-backward, gradient-accumulation]\nmax_grad_norm: null",
        "would have to wait for the last",
    ),
    (["bert", "classes.jsonl"], "techniques: [chunked-cross-entropy]", "no logits over a vocabulary"),
    (["mini", "pairs.jsonl"], "techniques: [gradient-accumulation]", "compares the rows of a batch with one another"),
    (["bert", "classes.jsonl"], "max_length: 65", "takes 3 to 64 tokens, and max_length is 65"),
    (["bert", "classes.jsonl"], "max_length: 2", "takes 3 to 64 tokens, and max_length is 2"),
    (["vit", "digits"], "max_length: 9", "max_length is for texts"),
    (["vit", "classes.jsonl"], "", "there is no 'image'"),
    (["bert", "classes.jsonl"], "optimizer: adam", "Did you mean 'adamw'?"),
    (["net.pt", "digits.npz"], "", "builder"),
]


@pytest.mark.parametrize(("given", "more", "said"), MISTAKES)
def test_a_mistake_is_answered_in_one_sentence_and_leaves_nothing(laconic, home, tmp_path, given, more, said):
    (home / "empty.jsonl").write_text("")
    (home / "one.jsonl").write_text(json.dumps({"text": "a", "label": "x"}))
    (home / "one.txt").write_text("a b a b\n")
    source, data = given
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"source: {home / source}\ndata: {home / data}\nsteps: 2\nloader: {{workers: 0}}\n{more}\n")
    code, out, err = laconic("finetune", "--recipe", recipe, "-o", tmp_path / "tuned")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("laconic: ")
    assert said in last
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("output", [".", "/", "file", "file/inside", "full"])
def test_an_output_that_is_in_the_way_is_found_before_anything_is_done(laconic, home, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    code, out, err = laconic("finetune", home / "gpt2", "--data", home / "texts.txt", "-o", output)
    assert (code, out) == (2, "")
    assert err.startswith("laconic: ")
    assert err.count("\n") == 1
    assert "Choose another --output" in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_logs_of_somebody_else_stay_and_a_failure_of_training_leaves_nothing(laconic, home, tmp_path):
    (tmp_path / "tuned.training").mkdir()
    (tmp_path / "tuned.training" / "mine").write_text("mine")
    code, _, err = laconic("finetune", home / "gpt2", "--data", home / "texts.txt", "-o", tmp_path / "tuned")
    assert code == 2
    assert "is not a run's: it will not be removed" in err.splitlines()[-1]
    assert (tmp_path / "tuned.training" / "mine").read_text() == "mine"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"source: {home / 'bert'}\ndata: {home / 'classes.jsonl'}\nsteps: 9\noptimizer: {{sgd: {{lr: 1.0e+38}}}}\n"
        f"max_grad_norm: null\nloader: {{workers: 0}}\n"
    )
    code, out, err = laconic("finetune", "--recipe", recipe, "-o", tmp_path / "failed")
    assert (code, out) == (1, "")
    assert "Try a lower learning rate" in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "tuned.training"]


def test_what_is_predicted_not_to_fit_is_not_begun(laconic, home, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"source: {home / 'net.pt'}\nbuilder: digits:DigitsNet\ndata: {home / 'digits.npz'}\nmemory: 1KiB\n"
        f"techniques: [{{gradient-accumulation: {{rows: 8}}}}]\n"
    )
    code, _, err = laconic("finetune", "--trust", "--recipe", recipe, "-o", tmp_path / "tuned")
    assert code == 3
    assert "these techniques are predicted to take" in err.splitlines()[-1]
    assert "the least that any takes" in err.splitlines()[-1]


def test_people_are_told_what_it_has_brought_and_what_is_next(laconic, home, tmp_path):
    code, out, err = laconic("finetune", home / "gpt2", "--data", home / "texts.txt", "-o", tmp_path / "tuned",
                             "--epochs", "1", "--batch", "20")  # fmt: skip
    assert code == 0
    shown = " ".join(out.split())
    for text in ("perplexity", "waited for data", f"Next: laconic compress {tmp_path / 'tuned'}"):
        assert text in shown
    assert "step 2/2" in err
    assert "evaluate after training" in err


SHORT = """
import resource, sys
import torch
from pathlib import Path
import train.planner.device_rates as measuring
measuring.MATRIX_SIDES, measuring.ARRAY_BYTES, measuring.SECONDS = {"cpu": (16, 64)}, {"cpu": (2**12, 2**18)}, 0.001
from laconic.cli import main
from train.finetune.advice import address_space
from train.finetune.finetune import finetune
from train.settings import TrainingRecipe
recipe, output, room = sys.argv[1:]
small = TrainingRecipe.load(Path(recipe), trust=True, batch_size=16, memory="1GiB", data={"limit": 100})
finetune(small, Path(output + "-small"), trust=True)  # everything is imported, and the machine is measured
limit = address_space() + int(room)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for more in ([], ["--auto"]):
    sys.argv = ["laconic", "finetune", "--trust", "--recipe", recipe, "-o", output, "--json", *more]
    try:
        main()
    except SystemExit as stopped:
        left = [path.name for path in Path(output).parent.glob("tuned*") if "small" not in path.name]
        print(f"code {stopped.code}, left {left}", file=sys.stderr)
"""


FRUGAL = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""What is freed is not mapped any more: so the room is the same each time."""


@pytest.fixture
def translate_memory_errors(tmp_path):
    """Runs `laconic finetune` of wide layers, without --auto and with it, in a process that may map so many more bytes
    than it has at the start."""
    rows, widths = 9000, [16, 512, 512, 512, 512, 4]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=values, label=values[:, :4].argmax(axis=1))
    torch.manual_seed(0)
    torch.save(models.Perceptron(widths).state_dict(), tmp_path / "net.pt")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"source: net.pt\nbuilder: models:Perceptron\narguments: {{widths: {widths}}}\ndata: data.npz\n"
        f"batch_size: 8000\nsteps: 1\nprecision: fp32\nloader: {{workers: 0}}\n"
    )

    def run(room: int) -> subprocess.CompletedProcess:
        places = os.pathsep.join([str(HERE), str(HERE.parent)])
        return subprocess.run(
            [sys.executable, "-c", SHORT, str(recipe), str(tmp_path / "tuned"), str(room)],
            env={**os.environ, "PYTHONPATH": places, **FRUGAL}, capture_output=True, text=True, check=True,
        )  # fmt: skip

    return run


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="only Linux tells what a process has mapped")
def test_out_of_memory_it_is_said_what_to_turn_on_and_auto_does_so(translate_memory_errors, tmp_path):
    done = translate_memory_errors(65 * 2**20)
    assert "Traceback" not in done.stderr
    said, told = (line for line in done.stderr.splitlines() if "ran out of memory" in line)
    assert said.startswith("laconic: the machine ran out of memory: ")
    assert "gradient-accumulation(rows=1000)" in said.partition("Turn on: ")[2]
    assert said.endswith("--auto does so by itself")
    assert "code 1, left []" in done.stderr
    assert told.startswith("note the machine ran out of memory: ")
    assert "code 0, left ['tuned']" in done.stderr
    found = json.loads(done.stdout)
    assert "gradient-accumulation(rows=1000)" in found["turned_on"]
    assert len(found["losses"]) == 1
    assert Checkpoint.load(tmp_path / "tuned", trust=True).history[-1].config["techniques"]
