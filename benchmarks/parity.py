"""Whether a training with techniques learns what plain training learns.

    python benchmarks/parity.py [--study digits] [--only bf16] [--cache .cache/bench]

Three studies: all-MiniLM-L6-v2 with a new head on docstrings, a small ResNet on digits, a small GPT-2 on docstrings.
Plain training is repeated with five seeds, which draw the head or the weights and the order of the samples. A technique
that calls itself exact must have the losses of plain training with the same seed; any other must end, on samples that
nothing has learned from, within what five seeds of plain training span. What is found is kept in the cache, and not
done again: a run that was interrupted goes on. Dropout is off, since it is drawn in another order where a batch is cut.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import studies
import torch
from provenance import run_git
from results import Results, make_parser
from studies import Study

from laconic import registry
from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.errors import RecipeError
from laconic.hashing import hash_of
from train.finetune.evaluate import evaluate
from train.observers import ObserverSettings
from train.parallel.ranks import Ranks
from train.settings import Training
from train.trainer import train

PLAIN = "plain"
SEEDS, FEWER = 5, 3
CLOSE = 1e-5
EARLY = 20
"""Steps after which rounding has not yet grown into another training."""
CPU = torch.device("cpu")
ROUNDED = {"stochastic_rounding": True}

EXACT: dict[str, tuple[Any, ...]] = {
    "gradient-checkpointing": ("gradient-checkpointing",),
    "gradient-checkpointing, selective": ({"gradient-checkpointing": {"policy": "selective"}},),
    "gradient-accumulation": ({"gradient-accumulation": {"rows": 4}},),
    "chunked-cross-entropy": ({"chunked-cross-entropy": {"chunk": 100}},),
    "chunked-cross-entropy, deferred": ({"chunked-cross-entropy": {"chunk": 100, "defer": True}},),
    "sdpa": ("sdpa",),
    "inplace-activations": ("inplace-activations",),
    "optimizer-in-backward": ("optimizer-in-backward",),
    "activation-offload to the host": ({"activation-offload": {"min_bytes": 4096}},),
    "activation-offload to a disk": ({"activation-offload": {"min_bytes": 4096, "destination": "disk"}},),
    "layerwise": ({"layerwise": {"rows": 4}},),
    "layerwise, 2 snapshots, optimizer-in-backward": ({"layerwise": {"snapshots": 2}}, "optimizer-in-backward"),
    "host-weights, fp32": ({"layerwise": {"rows": 4, "snapshots_on": "host"}}, {"host-weights": {"dtype": "fp32"}}),
    "sdpa + chunked-cross-entropy + gradient-checkpointing + gradient-accumulation": (
        "sdpa",
        "chunked-cross-entropy",
        "gradient-checkpointing",
        {"gradient-accumulation": {"rows": 4}},
    ),
}
"""What must give the same losses."""

NEAR: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "bf16": (("bf16",), {}),
    "fp16": (("fp16",), {}),
    "adamw-8bit": ((), {"optimizer": "adamw-8bit"}),
    "adamw-4bit": ((), {"optimizer": "adamw-4bit"}),
    "bf16 + gradient-checkpointing + adamw-8bit": (("bf16", "gradient-checkpointing"), {"optimizer": "adamw-8bit"}),
    "bf16 + activation-offload": (("bf16", {"activation-offload": {"min_bytes": 4096}}), {}),
    "host-weights, bf16": (({"layerwise": {"rows": 4, "snapshots_on": "host"}}, "host-weights"), {}),
    "pure-bf16": (("pure-bf16",), ROUNDED),
    "pure-bf16 + optimizer-in-backward + adamw-8bit": (
        ("pure-bf16", "optimizer-in-backward"),
        {"optimizer": "adamw-8bit", **ROUNDED},
    ),
    "lora": (("lora",), {"faster": 5}),
    "qlora": (("qlora", "bf16"), {"faster": 5}),
}
"""What must end near. faster: by how much the rate is higher, as is usual where adapters learn."""


@dataclass(frozen=True)
class Trial:
    """exact: whether the techniques call themselves so."""

    name: str
    training: Training
    exact: bool
    seeds: int


def trials(study: Study) -> Iterator[Trial]:
    """Plain training, and everything that the model might have a place for."""
    yield Trial(PLAIN, study.training, exact=True, seeds=SEEDS)
    for name, choice in EXACT.items():
        changed = study.training.with_techniques(named(choice), steps=study.few or study.training.steps)
        yield Trial(name, changed, exact=True, seeds=1)
    for name, (choice, settings) in NEAR.items():
        config = dict(study.training.optimizer.config)
        config["lr"] *= settings.get("faster", 1)
        config |= ROUNDED if "stochastic_rounding" in settings else {}
        optimizer = NamedSettings(name=settings.get("optimizer", "adamw"), config=config)
        changed = study.training.with_techniques(named(choice), optimizer=optimizer)
        yield Trial(name, changed, exact=False, seeds=FEWER)


def named(choice: Sequence[Any]) -> tuple[NamedSettings, ...]:
    """Techniques, from how a recipe writes them."""
    return tuple(NamedSettings.model_validate(each) for each in choice)


def run(study: Study, trial: Trial, seed: int) -> dict[str, Any]:
    """Train once: the loss of each step, and the figures on the samples held back; or why it cannot be done."""
    settings = trial.training.model_copy(update={"seed": seed})
    checkpoint = study.start(seed)
    objective = registry.resolve("objective", checkpoint.task.objective).of(checkpoint.task, study.learn)
    with tempfile.TemporaryDirectory() as folder:
        try:
            taught = train(
                checkpoint, study.learn, settings, Path(folder), ranks=Ranks(), objective=copy.copy(objective),
                observers=ObserverSettings(quiet=True),
            )  # fmt: skip
        except RecipeError as error:
            return {"refused": str(error)}
    figures = evaluate(taught.module, objective, study.held, CPU)
    return {"losses": list(taught.losses), "figures": figures}


def found(study: Study, trial: Trial, cache: Cache) -> list[dict[str, Any]]:
    """The runs of a trial, by seed, from the cache where they are there. One that is refused is refused once."""
    runs: list[dict[str, Any]] = []
    for seed in range(trial.seeds):
        key = hash_of("parity", study.name, trial.training.model_dump(mode="json"), seed, study.learn.fingerprint)
        runs.append(cache.json(f"parity-{key}", partial(run, study, trial, seed)))
        if "refused" in runs[-1]:
            break
    return runs


def apart(runs: list[dict[str, Any]], plain: list[dict[str, Any]], steps: int | None = None) -> float:
    """How far the loss of a step is from plain training's with the same seed, at most."""
    pairs = zip(runs, plain, strict=False)
    return max(
        abs(float(a) - float(b))
        for one, other in pairs
        for a, b in zip(one["losses"][:steps], other["losses"][:steps], strict=False)
    )


def line(study: Study, trial: Trial, runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    """The cells of a trial."""
    if "refused" in runs[0]:
        return [trial.name, "", "", "", "", f"does not apply: {runs[0]['refused'].partition('.')[0]}"]
    low, high = span(plain)
    steps = len(runs[0]["losses"])
    cells = [trial.name, f"{len(runs)} x {steps}", f"{apart(runs, plain, EARLY):.1e}", f"{apart(runs, plain):.1e}"]
    if steps < (study.training.steps or 0):
        same = apart(runs, plain, EARLY) <= CLOSE
        return [*cells, "", "same" if same else "**NOT the same**"]
    losses = [one["figures"]["loss"] for one in runs]
    figures = [next(iter(value for key, value in one["figures"].items() if key != "loss")) for one in runs]
    cells.append(f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}), {mean(figures):.4f}")
    inside = low <= mean(losses) <= high
    verdict = "within" if inside else f"**outside** by {max(low - mean(losses), mean(losses) - high):.4f}"
    if trial.exact and trial.name != PLAIN:
        paired = plain[0]["figures"]["loss"]
        same = apart(runs, plain, EARLY) <= CLOSE
        verdict = f"{'same' if same else '**NOT the same**'}; held-out loss {losses[0] - paired:+.1e} from plain"
    return [*cells, verdict]


def span(plain: list[dict[str, Any]]) -> tuple[float, float]:
    """The least and the greatest loss that plain training ends with."""
    losses = [one["figures"]["loss"] for one in plain]
    return min(losses), max(losses)


def main() -> None:
    """Train and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--study", choices=("minilm", "digits", "language"), help="one study alone")
    parser.add_argument("--only", help="one trial alone, by its name, beside plain training")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and results go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    commit = run_git("rev-parse", "HEAD") if arguments.publish else ""  # a published figure is of no older code
    cache = Cache(arguments.cache / "parity" / commit)
    makers: dict[str, Callable[[], Study]] = {
        "digits": studies.digits,
        "language": lambda: studies.language(arguments.cache),
        "minilm": lambda: studies.minilm(arguments.cache),
    }
    for name, make in makers.items():
        if arguments.study not in (None, name):
            continue
        study = make()
        print(
            f"\n{study.name}: {len(study.learn)} samples, {len(study.held)} held back, "
            f"batch {study.training.batch_size}\n"
        )
        figure = f"held-out loss, {'perplexity' if name == 'language' else 'accuracy'}"
        head = ["techniques", "seeds x steps", f"apart, first {EARLY} steps", "apart, all steps", figure, "verdict"]
        results.begin(name, head)
        plain: list[dict[str, Any]] = []
        for trial in trials(study):
            if arguments.only in (None, trial.name) or trial.name == PLAIN:
                runs = found(study, trial, cache)
                plain = plain or runs
                results.add(name, line(study, trial, runs, plain))


if __name__ == "__main__":
    main()
