"""A trial of a draft model: an artifact writes lone answers with it and without, and takes it where it is faster."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from export.report.added_sections import add_draft_trial
from export.validation.figures import round_figure
from laconic import registry
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.artifacts.draft import DRAFT, Draft
from laconic.artifacts.manifest import MANIFEST
from laconic.artifacts.placement import Placement
from laconic.cache import open_scratch_folder
from laconic.data.reader import read
from laconic.errors import RuntimeFailure, UsageError
from laconic.hardware import cores
from laconic.hashing import digest_file, seal
from laconic.progress import Step, Steps
from laconic.runtimes.decoder_file import encoder_of, is_language_model
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.generator import GenerationRequest, Generator, Sampling, TokenEvent
from laconic.tasks.text_generation import TextGeneration
from laconic.timing.measurements import DraftTrial

ENGINE = "openvino"
"""The engine that draft models are run by."""
CACHE_BYTES = 1 << 28
PROMPTS, TOKENS, ROUNDS = 6, 64, 5
"""Answers of a round, the most tokens of each, and rounds behind the first, which warms up."""
PLAIN, DRAFTED, PAGED = "plain", "drafted", "paged"


def add_draft(
    path: Path, draft: Path, destination: Path, *, data: Path | None = None, steps: Steps | None = None
) -> tuple[Artifact, DraftTrial]:
    """Write the artifact at `path` with the draft model of another one if lone answers come faster with it here, and
    as it was if they do not; the figures are in measured.json and the report either way. Return it and the figures.

    data: samples whose prompts are answered; by default the golden inputs. Raises UsageError for artifacts that do not
    go together, RuntimeFailure where an engine refuses one.
    """
    check_destination(destination)
    steps = steps or Steps()
    artifact, drafting = Artifact.load(path), Artifact.load(draft)
    pair = DraftPair(artifact, drafting)
    with steps.step("write with the draft model and without", (ROUNDS + 1) * PROMPTS) as step:
        trial = pair.try_out(pair.choose_prompts(data), step)
        step.note = f"{trial.ratio[1]:.2f} x"
    with open_scratch_folder(destination) as scratch:
        folder = scratch / "artifact"
        folder.mkdir()
        for name in artifact.listed:
            shutil.copyfile(path / name, folder / name)
        pair.write_draft(folder, trial)
        add_draft_trial(folder, trial)
        publish_artifact(folder, destination)
    return Artifact.load(destination), trial


class DraftPair:
    """An artifact, and another one whose model drafts for it."""

    def __init__(self, artifact: Artifact, drafting: Artifact) -> None:
        self.artifact = artifact
        self.drafting = drafting
        self.placement, self.draft_placement = find_placement(artifact), find_placement(drafting)
        task, draft_task = cast(TextGeneration, artifact.task()), cast(TextGeneration, drafting.task())
        if task.tokenizer.get_vocab() != draft_task.tokenizer.get_vocab():
            raise UsageError(
                f"{drafting.path} has another tokenizer than {artifact.path}, so that its tokens mean other texts. "
                f"Give a draft that was made from the same model"
            )
        if draft_task.max_tokens < task.max_tokens:
            raise UsageError(
                f"{drafting.path} takes texts of {draft_task.max_tokens} tokens, and {artifact.path} of "
                f"{task.max_tokens}. Give a draft that was made from the same model"
            )
        self.task = task

    def choose_prompts(self, data: Path | None) -> list[tuple[int, ...]]:
        """Choose the prompts that are answered: of samples, or of the golden inputs. Raises DataError."""
        room = max(1, self.task.max_tokens - TOKENS)
        if data is None:
            rows = [row for inputs, _ in self.artifact.golden(self.placement) for row in list_prompts(inputs)]
            return [row[:room] for row in rows[:PROMPTS]]
        samples = read(data, self.task).take(PROMPTS, 0).samples
        return [tuple(prompt)[:room] for prompt, _ in self.task.divide(samples)]

    def try_out(self, prompts: Sequence[tuple[int, ...]], step: Step) -> DraftTrial:
        """Answer the prompts in each engine, round after round. Raises RuntimeFailure."""
        with ExitStack() as stack:
            engines: dict[str, Generator] = {}
            for name, open_engine in self.list_engines().items():
                engines[name] = stack.enter_context(open_engine())
            try:
                engines[PAGED] = stack.enter_context(self.open_engine("openvino-genai"))
            except RuntimeFailure as error:  # of a model that cannot be paged
                step.note = str(error)
            return compare_engines(engines, prompts, self.task.settings.eos_token_id, self.drafting.name, step)

    def list_engines(self) -> Mapping[str, Callable[[], Generator]]:
        """Return what opens the engine that is stepped, without the draft model and with it."""
        model = self.drafting.path / self.draft_placement.model
        draft = DraftFile(model, self.draft_placement.compute, beats_paged=False)
        name = "openvino-decoder"
        return {PLAIN: lambda: self.open_engine(name), DRAFTED: lambda: self.open_engine(name, draft=draft)}

    def open_engine(self, name: str, **options: Any) -> Generator:
        """Open the artifact's model in an engine that writes. Raises RuntimeFailure."""
        generator: Generator = registry.resolve("generator", name)(
            self.artifact.path / self.placement.model,
            context=self.task.max_tokens,
            cache_bytes=CACHE_BYTES,
            threads=cores(),
            compute=self.placement.compute,
            **options,
        )
        return generator

    def write_draft(self, folder: Path, trial: DraftTrial) -> None:
        """Write the draft model and the manifest that lists it into a copy of the artifact, if the trial is for it; an
        earlier one goes."""
        manifest = self.artifact.manifest
        files = {name: digest for name, digest in manifest.files.items() if name != DRAFT}
        (folder / DRAFT).unlink(missing_ok=True)
        draft = None
        if trial.is_faster:
            shutil.copyfile(self.drafting.path / self.draft_placement.model, folder / DRAFT)
            files[DRAFT] = digest_file(folder / DRAFT)
            draft = Draft(model=DRAFT, compute=self.draft_placement.compute, beats_paged=trial.beats_paged)
        changed = manifest.model_copy(update={"files": files, "draft": draft})
        (folder / MANIFEST).write_bytes(seal(changed.model_dump(mode="json")))


def find_placement(artifact: Artifact) -> Placement:
    """Find what an artifact is served from by the engine of draft models. Raises UsageError for another model than a
    language model for that engine."""
    placement = next((each for each in artifact.manifest.placements if each.runtime == ENGINE), None)
    if placement is None:
        raise UsageError(f"{artifact.path} is not made for OpenVINO, which alone runs draft models. Compress it for it")
    model = artifact.path / placement.model
    if artifact.task().generation is None or not is_language_model(model) or encoder_of(model).is_file():
        raise UsageError(f"{artifact.path} is no language model that reads text alone, and draft models are for these")
    return placement


def list_prompts(inputs: Arrays) -> Iterator[tuple[int, ...]]:
    """Yield the prompts in golden inputs: the tokens up to the first one that an answer follows."""
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        yield tuple(ids[: int(mask.argmax()) + 1].tolist())


def compare_engines(
    engines: Mapping[str, Generator], prompts: Sequence[tuple[int, ...]], stop: Sequence[int], draft: str, step: Step
) -> DraftTrial:
    """Answer prompts one at a time, in one engine after the other, round after round. stop: tokens that end an answer.
    draft: the draft's name. Raises UsageError for answers that are too short to be timed."""
    sampling = Sampling(TOKENS, stop_token_ids=tuple(stop))
    rates: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[tuple[int, ...]]] = {}
    events: list[TokenEvent] = []
    for turn in range(ROUNDS + 1):
        answers: dict[str, list[TimedAnswer]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                answers[name].append(write_answer(engine, prompt, sampling))
            step.advance()
        for name, row in answers.items():
            count, seconds = sum(len(each.tokens) - 1 for each in row), sum(each.seconds for each in row)
            if not count:
                raise UsageError(
                    "the answers end with their first token, and cannot be timed. Give other samples: --data"
                )
            if turn:  # the first warms up
                rates[name].append(count / seconds)
            texts[name] = [each.tokens for each in row]
        events = [event for each in answers[DRAFTED] for event in each.events]
    return DraftTrial(
        draft=draft,
        prompts=len(prompts),
        same=sum(plain == drafted for plain, drafted in zip(texts[PLAIN], texts[DRAFTED], strict=True)),
        tokens=TOKENS,
        drafted=sum(event.drafted for event in events),
        accepted=sum(event.accepted for event in events),
        tokens_per_second={name: round_figure(float(np.median(row))) for name, row in rates.items()},
        ratio=measure_ratio(rates[DRAFTED], rates[PLAIN]),
        paged_ratio=measure_ratio(rates[DRAFTED], rates[PAGED]) if PAGED in rates else None,
    )


def measure_ratio(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two rates over rounds: the lower quartile, the median and the upper quartile."""
    low, median, high = np.quantile(np.divide(rates, others), [0.25, 0.5, 0.75])
    return round_figure(float(low)), round_figure(float(median)), round_figure(float(high))


@dataclass(frozen=True)
class TimedAnswer:
    """What an engine wrote. seconds: behind the first token."""

    tokens: tuple[int, ...]
    seconds: float
    events: Sequence[TokenEvent]


def write_answer(engine: Generator, prompt: tuple[int, ...], sampling: Sampling) -> TimedAnswer:
    """Write an answer in an engine that writes nothing else meanwhile."""
    engine.add(GenerationRequest(1, prompt, sampling))
    events: list[TokenEvent] = []
    start = 0.0
    while not engine.is_idle:
        written = [event for event in engine.step() if event.token_ids]
        if written and not events:
            start = time.perf_counter()
        events += written
    return TimedAnswer(
        tuple(token for event in events for token in event.token_ids), time.perf_counter() - start, events
    )
