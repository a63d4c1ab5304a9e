"""Laconic beside transformers' Trainer and a plain loop with Accelerate: what is learned, in what time and memory.

    python benchmarks/trainers.py [--only GPT-2] [--kind lora] [--seeds 3] [--cache .cache/bench]

Two studies, all-MiniLM-L6-v2 as a classifier of docstrings and a small GPT-2 (trainer_studies.py), each trained in
three ways: plainly in FP32; LoRA; within a limit of memory, where Laconic's planner chooses, and the peers, which
predict nothing, take the first of MEANS that the planner predicts to fit. Batches, learning rates, clipping, steps and
seeds are the same for all.

Every run has a process of its own, and the three of a seed take their steps in turns (trainer_turns.py). A step's time
is the processor time of its process, with one thread; ratios are those of steps that were taken one after the other.
Memory is the greatest resident size in all steps, less the resident size before the model was loaded, with freed
blocks returned to the system at once; it is measured apart. Each trainer has trained a tiny model before, so that the
code that it loads at its first step is not among it. Results are kept in the cache.
"""

import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trainer_studies
from results import Results, make_parser
from trainer_peers import TRAINERS, PeerMeans, TrainerRun, take_run
from trainer_studies import TrainerStudy

from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from train.callbacks.callback import StepReport
from train.callbacks.run_estimate import RunEstimate
from train.planner.combinations import format_technique
from train.planner.device_rates import measure_rates
from train.planner.memory_plan import plan_memory
from train.planner.memory_prediction import HEADROOM
from train.planner.meta_model import open_meta_model
from train.planner.prediction import predict
from train.settings import Training

FASTER = 5
"""By how much the learning rate is higher where adapters learn, as is usual."""
SKIPPED = 2
"""Steps at the beginning that are not timed."""
MIB = 2**20
MEANS = (
    PeerMeans(bf16=True),
    PeerMeans(bf16=True, rows=4),
    PeerMeans(bf16=True, checkpointing=True),
    PeerMeans(bf16=True, checkpointing=True, rows=4),
    PeerMeans(checkpointing=True, rows=1),
)
"""What a peer may do to fit into memory, the fastest first."""
HEAD = ("training", "trainer", "means", "held-out loss", "accuracy", "step, and by Laconic's", "peak, MiB")
KINDS = ("plain", "lora", "limit")


def take_turns(runs: Sequence[TrainerRun]) -> list[dict[str, Any]]:
    """Do the runs in turns; gives the result of each, with the seconds of its steps."""
    # Not forked: a child would count the code of libraries that it touches, which its parent has in memory already.
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in runs]
    found: list[dict[str, Any]] = []
    times: list[list[float]] = [[] for _ in runs]
    for run, (here, there) in zip(runs, pipes, strict=True):
        context.Process(target=take_run, args=(run, there), daemon=True).start()
        there.close()
        here.recv()  # ready: one after the other, so that no run is timed while another loads
    for turn in range(runs[0].steps):
        for index in (*range(turn % len(runs), len(runs)), *range(turn % len(runs))):
            pipes[index][0].send(True)
            times[index].append(pipes[index][0].recv())
    for (here, _), seconds in zip(pipes, times, strict=True):
        here.send(True)
        found.append({**json.loads(here.recv()), "seconds": seconds})
    return found


def run_seed(study: TrainerStudy, settings: Mapping[str, tuple[PeerMeans, Mapping[str, Any], float]], seed: int) -> Any:
    """The results of all trainers with a seed. settings: of each trainer, its means, recipe and learning rate."""
    return take_turns(
        [
            TrainerRun(study, trainer, seed, lr, means, recipe, study.steps)
            for trainer, (means, recipe, lr) in settings.items()
        ]
    )


def measure_peak(
    study: TrainerStudy, trainer: str, means: PeerMeans, recipe: Mapping[str, Any], lr: float
) -> dict[str, Any]:
    """The peak of a trainer alone, and what else it says."""
    (found,) = take_turns([TrainerRun(study, trainer, 0, lr, means, recipe, study.steps, maps=True)])
    return found


class Comparison:
    """The runs of a study, kept in a cache."""

    def __init__(self, study: TrainerStudy, seeds: int, cache: Cache) -> None:
        self.study, self._seeds, self._cache = study, seeds, cache
        self.estimates: list[float] = []
        """Of Laconic's runs, as by `replay_estimate`."""

    def rows(self, kind: str) -> list[list[str]]:
        """The rows of a kind of training: one for each trainer."""
        lr = self.study.lr * (FASTER if kind == "lora" else 1)
        settings = {trainer: (*self.choose(kind, trainer, lr), lr) for trainer in TRAINERS}
        peaks = [self.peak(trainer, *each)["peak"] for trainer, each in settings.items()]
        named = {name: [means.name, dict(recipe), lr] for name, (means, recipe, lr) in settings.items()}
        seeds = [
            self.kept("runs", [named, seed], partial(run_seed, self.study, settings, seed))
            for seed in range(self._seeds)
        ]
        self.estimates += [replay_estimate(results[0]["seconds"][1:-1]) for results in seeds]
        rows = []
        for index, (trainer, (means, recipe, _)) in enumerate(settings.items()):
            runs = [results[index] for results in seeds]
            words = describe_recipe(recipe) if trainer == "Laconic" else means.name or "none"
            cells = [kind, trainer, words, *describe_figures(runs)]
            rows.append([*cells, describe_times(index, seeds), f"{peaks[index] / MIB:.0f}"])
        return rows

    def choose(self, kind: str, trainer: str, lr: float) -> tuple[PeerMeans, Mapping[str, Any]]:
        """The means of a peer and the recipe of Laconic."""
        if kind == "plain":
            return PeerMeans(), {}
        if kind == "lora":
            return PeerMeans(lora=True), {"techniques": ["lora"]}
        if trainer == "Laconic":
            return PeerMeans(), self.kept("choice", [self.study.limit], partial(plan, self.study))
        return MEANS[self.kept("means", [self.study.limit], partial(find_means, self.study))], {}

    def peak(self, trainer: str, means: PeerMeans, recipe: Mapping[str, Any], lr: float) -> dict[str, Any]:
        """What a trainer's peak was measured to be."""
        work = partial(measure_peak, self.study, trainer, means, recipe, lr)
        found: dict[str, Any] = self.kept("peak", [trainer, means.name, dict(recipe), lr], work)
        return found

    def kept(self, what: str, key: Any, work: Any) -> Any:
        """What the work gives, from the cache where it is there."""
        digest = hash_of("trainers", what, replace(self.study, train=Path(), held=Path()).__repr__(), key)
        return self._cache.json(f"trainers-{what}-{digest}", work)


def plan(study: TrainerStudy) -> dict[str, Any]:
    """What `laconic plan` chooses for the study's limit, as a recipe."""
    model = open_meta_model(study.folder(0), task=study.task)
    training = Training.model_validate({"batch_size": study.batch})
    found = plan_memory(
        model, training, length=study.length, memory=study.limit * MIB, device=torch.device("cpu"),
        steps=Steps(quiet=True),
    )  # fmt: skip
    if found.chosen is None:
        raise SystemExit(f"bench: nothing fits into {study.limit} MiB")
    chosen = found.chosen.combination.training
    techniques = [each.to_yaml_value() for each in chosen.techniques]
    recipe: dict[str, Any] = {"techniques": techniques, "max_grad_norm": chosen.max_grad_norm}
    if chosen.optimizer.name != "adamw":
        recipe["optimizer"] = chosen.optimizer.to_yaml_value()
    return recipe


def find_means(study: TrainerStudy) -> int:
    """The index of the first of MEANS that is predicted to fit into the study's limit."""
    model, rates = open_meta_model(study.folder(0), task=study.task), measure_rates(torch.device("cpu"))
    for index, means in enumerate(MEANS):
        techniques: list[Any] = ["bf16"] if means.bf16 else []
        techniques += ["gradient-checkpointing"] if means.checkpointing else []
        techniques += [{"gradient-accumulation": {"rows": means.rows}}] if means.rows else []
        training = Training.model_validate({"batch_size": study.batch, "techniques": techniques})
        if predict(model, training, study.length, rates).total <= study.limit * MIB * (1 - HEADROOM):
            return index
    raise SystemExit(f"bench: no means of a peer fits into {study.limit} MiB")


def describe_recipe(recipe: Mapping[str, Any]) -> str:
    """The techniques of a recipe, as in a table."""
    if not recipe:
        return "none"
    training = Training.model_validate({key: recipe[key] for key in recipe if key in ("techniques", "optimizer")})
    names = [f"`{format_technique(each)}`" for each in training.techniques]
    if "optimizer" in recipe and training.optimizer.name != "adamw":
        names.append(f"`{training.optimizer.name}`")
    if recipe.get("max_grad_norm", 1.0) is None:
        names.append("no clipping")
    return " + ".join(names)


def describe_figures(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The mean of each figure over the seeds, with its range."""
    for name, digits in (("loss", 4), ("accuracy", 3)):
        values = [run[name] for run in runs if name in run]
        if values:
            yield f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
        else:
            yield ""


def describe_times(index: int, seeds: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The median time of a step, and its ratio to Laconic's of the same turn, with the quartiles."""
    times = [[results[at]["seconds"][SKIPPED:-1] for results in seeds] for at in (index, 0)]
    own, ours = ([seconds for each in every for seconds in each] for every in times)
    median = f"{1000 * statistics.median(own):.0f} ms"
    if index == 0:
        return median
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, ours, strict=True)], n=4)
    return f"{median}, {middle:.2f} x ({low:.2f} to {high:.2f})"


def replay_estimate(seconds: Sequence[float]) -> float:
    """The time that a run would have been estimated to take, once its first steps were timed, by the time that it took.
    seconds: of each step but the first."""
    told: list[tuple[float, int]] = []
    estimate = RunEstimate(len(seconds) + 1, lambda each, left: told.append((each, left)))
    for number, each in enumerate(seconds, 2):
        estimate.step(StepReport(step=number, loss=0.0, lr=0.0, tokens=0, rows=0, seconds=each, waited=0.0))
    ((pace, left),) = told
    return pace * left / sum(seconds[-left:])


def main() -> None:
    """Train and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=("MiniLM", "GPT-2"), help="one study alone")
    parser.add_argument("--kind", choices=KINDS, help="one kind of training alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and results go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    for name, make in {"MiniLM": trainer_studies.minilm, "GPT-2": trainer_studies.gpt}.items():
        if arguments.only not in (None, name):
            continue
        study = make(arguments.cache, arguments.seeds)
        comparison = Comparison(study, arguments.seeds, Cache(arguments.cache / "trainers"))
        print(
            f"\n{study.name}: {study.steps} steps of {study.batch} rows of at most {study.length} tokens, "
            f"{arguments.seeds} seeds; limit {study.limit} MiB\n"
        )
        results.begin(name, HEAD)
        for kind in KINDS:
            if arguments.kind in (None, kind):
                for row in comparison.rows(kind):
                    results.add(name, row)
        low, high = min(comparison.estimates), max(comparison.estimates)
        print(f"\nTime as estimated from the first steps, by the time of Laconic's runs: {low:.2f} to {high:.2f}.")


if __name__ == "__main__":
    main()
