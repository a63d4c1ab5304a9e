"""One run of a trainer: Laconic's, transformers' Trainer, or a plain loop with Accelerate, on the same batches.

All take AdamW (fused) with weight decay for matrices alone, Laconic's linear schedule, and clip the gradient to 1. All
measure their loss on the rows that are held back before they train, as Laconic always does.
"""

import ctypes
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import trainer_turns
import transformers
from torch import nn
from torch.utils.data import DataLoader
from trainer_studies import TrainerStudy
from trainer_turns import NoTurns, StepTurns, TrainerTurns

from laconic.progress import Steps
from train.data.batch_sampler import BatchSampler
from train.finetune.finetune import finetune
from train.memory.allocator import set_mmap_threshold
from train.observers import ObserverSettings
from train.optimizers.optimizer import parameter_groups
from train.optimizers.schedule import Linear
from train.planner.device_rates import measure_rates
from train.settings import TrainingRecipe

LACONIC = "Laconic"
DECAY, CLIP = 0.01, 1.0
BF16_MULTIPLE, EVALUATED = 8, 32
WARM_STEPS = 2
MAPPED = 2**16
"""Bytes from which a freed block goes back to the system where memory is measured, so that the resident size is what is
held and not what glibc keeps."""


@dataclass(frozen=True)
class PeerMeans:
    """What a peer is told to do. rows: of a micro-batch; None takes the batch as a whole."""

    bf16: bool = False
    checkpointing: bool = False
    rows: int | None = None
    lora: bool = False

    @property
    def name(self) -> str:
        """As in a table."""
        parts = {"BF16": self.bf16, "gradient checkpointing": self.checkpointing, "LoRA by peft": self.lora}
        names = [name for name, is_on in parts.items() if is_on]
        return " + ".join(names + ([f"accumulation of {self.rows} rows"] if self.rows else []))


@dataclass(frozen=True)
class TrainerRun:
    """trainer: a name of TRAINERS. recipe: what Laconic's recipe has beside the study's settings. maps: whether freed
    blocks go back to the system at once."""

    study: TrainerStudy
    trainer: str
    seed: int
    lr: float
    means: PeerMeans
    recipe: Mapping[str, Any]
    steps: int
    maps: bool = False

    def batches(self, rows: int) -> list[list[int]]:
        """The rows of each batch, as Laconic draws them."""
        sampler = BatchSampler(rows, self.study.batch, self.seed)
        return [sampler.batch(step) for step in range(self.steps)]


def take_run(run: TrainerRun, connection: Connection) -> None:
    """Do a run in this process, in turns with others."""
    torch.set_num_threads(1)
    if run.maps:
        measure_rates(torch.device("cpu"))  # kept for later runs, whose elementwise passes map no memory anew
        set_mmap_threshold(MAPPED)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warm_up(run)
    turns = StepTurns(connection, late=run.trainer != LACONIC)
    trainer_turns.CURRENT.append(turns)
    ctypes.CDLL(None).malloc_trim(0)
    turns.open_model()
    module, losses = TRAINERS[run.trainer](run, turns)
    turns.finish({"losses": losses, **run.study.judge(module, run.seed)})


def warm_up(run: TrainerRun) -> None:
    """Train a tiny model in the same way, so that the code that a trainer loads at its first step is not counted as
    memory of the training."""
    turns = NoTurns()
    trainer_turns.CURRENT.append(turns)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(run.study, run.seed, Path(folder))
        study = replace(run.study, model=folder)
        TRAINERS[run.trainer](replace(run, study=study, steps=WARM_STEPS), turns)


def write_tiny(study: TrainerStudy, seed: int, folder: Path) -> None:
    """Write a tiny model of the study's class, with its tokenizer."""
    config = transformers.AutoConfig.from_pretrained(study.folder(seed))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 32}
    config.update(sizes if study.classifies else {"n_embd": 32, "n_layer": 2, "n_head": 1})
    automatic(study).from_config(config).save_pretrained(folder)
    study.open_tokenizer(seed).save_pretrained(folder)


def automatic(study: TrainerStudy) -> Any:
    """The class that opens the study's models."""
    return transformers.AutoModelForSequenceClassification if study.classifies else transformers.AutoModelForCausalLM


def run_laconic(run: TrainerRun, turns: TrainerTurns) -> tuple[nn.Module, list[float]]:
    """`laconic finetune`, with its usual observers."""
    study = run.study
    settings: dict[str, Any] = {
        "source": str(study.folder(run.seed)), "task": study.task,
        "data": {"train": str(study.train), "evaluate": str(study.held)},
        "batch_size": study.batch, "max_length": study.length, "steps": run.steps, "seed": run.seed,
        "optimizer": {"adamw": {"lr": run.lr, "weight_decay": DECAY}}, "max_grad_norm": CLIP,
        "precision": "fp32", "snapshot_every": 10**6, "eval_every": 10**6,
        "callbacks": ["trainer_turns:Turns"],
    }  # fmt: skip
    recipe = TrainingRecipe.load(None, trust=True, **settings | dict(run.recipe))
    with tempfile.TemporaryDirectory() as folder:
        tuned = finetune(
            recipe, Path(folder) / "out", trust=True, observers=ObserverSettings(quiet=True), steps=Steps(quiet=True)
        )
    module: Any = tuned.checkpoint.module
    return module.model, list(tuned.training.losses)


def open_peer(run: TrainerRun) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model of a peer, its optimizer and its schedule."""
    torch.manual_seed(run.seed)
    model = automatic(run.study).from_pretrained(run.study.folder(run.seed))
    if run.means.lora:
        bert, gpt = r".*encoder\.layer\..*\.(query|key|value|dense)", r".*\.h\..*\.c_(attn|proj|fc)"
        inside = bert if run.study.classifies else gpt
        heads = ["pooler", "classifier"] if run.study.classifies else None
        config = peft.LoraConfig(
            r=16, lora_alpha=32, target_modules=inside, modules_to_save=heads, fan_in_fan_out=not run.study.classifies
        )
        model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=run.lr, fused=True)
    return model, optimizer, Linear().build(optimizer, run.steps)


def make_batches(run: TrainerRun, rows: list[dict[str, Any]]) -> DataLoader[Any]:
    """The micro-batches of all steps."""
    size = run.means.rows or run.study.batch
    parts = [batch[at : at + size] for batch in run.batches(len(rows)) for at in range(0, len(batch), size)]
    dataset: Any = rows
    return DataLoader(dataset, batch_sampler=parts, collate_fn=collate(run))


def collate(run: TrainerRun) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """What makes a batch of rows; in BF16 padded to a multiple of 8 tokens, as in transformers' examples."""
    return partial(run.study.collate, multiple=BF16_MULTIPLE if run.means.bf16 else 1)


def held_rows(run: TrainerRun, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows that are held back, the shortest first."""
    return sorted(run.study.rows(run.study.held, run.seed, tokenizer), key=lambda row: len(row["input_ids"]))


def evaluate_loss(run: TrainerRun, model: nn.Module, rows: list[dict[str, Any]]) -> float:
    """The mean loss of a model on some rows."""
    model.eval()
    total, terms = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), EVALUATED):
            batch = collate(run)(rows[start : start + EVALUATED])
            count = run.study.count_terms(batch)
            total, terms = total + float(model(**batch).loss) * count, terms + count
    return total / terms


class TurnsCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer take turns."""

    def __init__(self, turns: TrainerTurns) -> None:
        self._turns = turns

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        self._turns.begin()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self._turns.end_step()


def run_trainer(run: TrainerRun, turns: TrainerTurns) -> tuple[nn.Module, list[float]]:
    """transformers' Trainer, which logs and saves nothing."""
    model, optimizer, schedule = open_peer(run)
    tokenizer, losses = run.study.open_tokenizer(run.seed), list[torch.Tensor]()
    rows = run.study.rows(run.study.train, run.seed, tokenizer)

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        """Takes the given batches, and remembers its losses."""

        def get_train_dataloader(self) -> DataLoader[Any]:
            return make_batches(run, rows)

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            if self.model.training:
                losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    parts = run.study.batch // (run.means.rows or run.study.batch)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, max_steps=run.steps, per_device_train_batch_size=run.study.batch // parts,
            gradient_accumulation_steps=parts, max_grad_norm=CLIP, bf16=run.means.bf16, seed=run.seed,
            gradient_checkpointing=run.means.checkpointing, logging_strategy="no", save_strategy="no",
            eval_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
            optim="adamw_torch_fused", per_device_eval_batch_size=EVALUATED, prediction_loss_only=True,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=settings, train_dataset=rows, optimizers=(optimizer, schedule),
            eval_dataset=held_rows(run, tokenizer), data_collator=collate(run), processing_class=tokenizer,
            callbacks=[TurnsCallback(turns)],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.evaluate()
        trainer.train()
    return model, [float(each) for each in losses]


def run_accelerate(run: TrainerRun, turns: TrainerTurns) -> tuple[nn.Module, list[float]]:
    """A plain loop with Accelerate. The loss of a micro-batch is divided by the terms of the whole batch."""
    model, optimizer, schedule = open_peer(run)
    if run.means.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if run.means.bf16 else "no")
    tokenizer = run.study.open_tokenizer(run.seed)
    rows = run.study.rows(run.study.train, run.seed, tokenizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_batches(run, rows))
    parts = run.study.batch // (run.means.rows or run.study.batch)
    evaluate_loss(run, model, held_rows(run, tokenizer))
    model.train()
    losses: list[torch.Tensor] = []
    batches = iter(loader)
    turns.begin()
    for _ in range(run.steps):
        micro = [next(batches) for _ in range(parts)]
        total = sum(run.study.count_terms(each) for each in micro)
        for batch in micro:
            # The mean over the micro-batch, weighed by its share of the terms.
            loss = model(**batch).loss * (run.study.count_terms(batch) / total)
            accelerator.backward(loss)
            losses.append(loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turns.end_step()
    return accelerator.unwrap_model(model), [float(each) for each in losses]


TRAINERS: Mapping[str, Callable[[TrainerRun, TrainerTurns], tuple[nn.Module, list[float]]]] = {
    LACONIC: run_laconic,
    "Trainer": run_trainer,
    "Accelerate": run_accelerate,
}
