"""What the trainers learn: all-MiniLM-L6-v2 as a classifier of docstrings, and a small GPT-2 as a model of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from corpus import corpus
from inputs import CLASSES, learn_tokenizer, model_folder, read_classes, texts

HELD = 0.2
WORDS, BASE_ROWS, BASE_STEPS = 4096, 8000, 300
"""Of the language model: its vocabulary, and the texts and steps by which it learns the base that is fine-tuned."""


@dataclass(frozen=True)
class TrainerStudy:
    """A model and its data. model: a folder of transformers, "{seed}" in it stands for the seed. limit: MiB that the
    third kind of training may take."""

    name: str
    task: str
    model: str
    train: Path
    held: Path
    steps: int
    batch: int
    length: int
    lr: float
    limit: int

    @property
    def classifies(self) -> bool:
        """Whether rows have labels."""
        return self.task == "text-classification"

    def folder(self, seed: int) -> Path:
        """The folder of the model that a seed trains."""
        return Path(self.model.format(seed=seed))

    def open_tokenizer(self, seed: int) -> Any:
        """The tokenizer of the model that a seed trains. A user's script holds it while it trains."""
        return transformers.AutoTokenizer.from_pretrained(self.folder(seed))

    def rows(self, path: Path, seed: int, tokenizer: Any) -> list[dict[str, Any]]:
        """The rows of a file as a trainer of transformers takes them: input_ids, and the label of a classifier."""
        labels = transformers.AutoConfig.from_pretrained(self.folder(seed)).label2id
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if self.classifies:
                ids = tokenizer(row["text"], truncation=True, max_length=self.length)["input_ids"]
                rows.append({"input_ids": ids, "labels": labels[row["label"]]})
            else:
                ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
                rows.append({"input_ids": ids, "labels": ids})
        return rows

    def collate(self, rows: list[dict[str, Any]], multiple: int = 1) -> dict[str, torch.Tensor]:
        """A batch of rows, padded on the right to a multiple of so many tokens; padding has the label -100."""
        lengths = [len(row["input_ids"]) for row in rows]
        width = -(-max(lengths) // multiple) * multiple

        def pad(values: list[list[int]], blank: int) -> torch.Tensor:
            return torch.tensor([each + [blank] * (width - len(each)) for each in values])

        ids = [row["input_ids"] for row in rows]
        labels = [row["labels"] for row in rows]
        return {
            "input_ids": pad(ids, 0),
            "attention_mask": pad([[1] * length for length in lengths], 0),
            "labels": torch.tensor(labels) if self.classifies else pad(labels, -100),
        }

    def count_terms(self, batch: dict[str, torch.Tensor]) -> int:
        """The labels of a batch that its loss is the mean of."""
        labels = batch["labels"] if self.classifies else batch["labels"][:, 1:]
        return int((labels != -100).sum())

    def judge(self, module: torch.nn.Module, seed: int) -> dict[str, float]:
        """The loss of a model of transformers on the rows that are held back; of a classifier also its accuracy."""
        module.eval()
        rows = sorted(self.rows(self.held, seed, self.open_tokenizer(seed)), key=lambda row: len(row["input_ids"]))
        loss, terms, right = 0.0, 0, 0
        with torch.no_grad():
            for start in range(0, len(rows), 32):
                batch = self.collate(rows[start : start + 32])
                labels = batch.pop("labels")
                logits = module(**batch).logits.float()
                if not self.classifies:
                    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                terms += int((labels != -100).sum())
                right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / terms} | ({"accuracy": right / terms} if self.classifies else {})


def minilm(folder: Path, seeds: int) -> TrainerStudy:
    """all-MiniLM-L6-v2 with a new head of the seed: from which package a docstring is."""
    source = model_folder(folder)
    rows = [{"text": text, "label": label} for text, label in read_classes(folder)]
    names = dict(enumerate(sorted(CLASSES)))
    for seed in range(seeds):
        path = folder / f"trainers-minilm-{seed}"
        if not path.exists():
            torch.manual_seed(seed)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                source, id2label=names, label2id={name: index for index, name in names.items()}
            )
            transformers.AutoTokenizer.from_pretrained(source).save_pretrained(path)
            model.save_pretrained(path)
    train, held = write_parts(folder / "trainers-minilm", rows, 16)
    return TrainerStudy(
        "MiniLM", "text-classification", str(folder / "trainers-minilm-{seed}"), train, held,
        steps=24, batch=16, length=64, lr=3e-4, limit=400,
    )  # fmt: skip


def gpt(folder: Path, seeds: int) -> TrainerStudy:
    """A GPT-2 of four layers that has learned the docstrings of installed packages, and goes on with those of Python's
    standard library; without dropout, so all trainers see the same losses."""
    path, length = folder / "trainers-gpt", 64
    given, _ = texts(folder)
    if not path.exists():
        file = folder / "trainers-corpus.jsonl"
        corpus(file, BASE_ROWS)
        write_base(path, [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()], length)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    every = [{"text": json.loads(line)["text"]} for line in given.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in every if len(tokenizer(row["text"])["input_ids"]) < length][:1200]
    train, held = write_parts(path.with_name("trainers-gpt-rows"), rows, 16)
    return TrainerStudy(
        "GPT-2", "text-generation", str(path), train, held, steps=40, batch=8, length=length, lr=5e-4, limit=64
    )


def write_parts(path: Path, rows: list[dict[str, str]], batch: int) -> tuple[Path, Path]:
    """The rows to train with, of which every batch is full, and those that are held back, in files."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    count = int(len(rows) * (1 - HELD)) // batch * batch
    paths = path.with_name(f"{path.name}-train.jsonl"), path.with_name(f"{path.name}-held.jsonl")
    for each, chosen in zip(paths, (order[:count], order[count:]), strict=True):
        each.write_text("".join(f"{json.dumps(rows[index])}\n" for index in chosen), encoding="utf-8")
    return paths


def write_base(path: Path, lines: list[str], length: int) -> None:
    """Train the base of the GPT-2 and its tokenizer, and write both in transformers' format."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learn_tokenizer(lines, WORDS, ("<end>", "<pad>")),
        eos_token="<end>",
        bos_token="<end>",
        pad_token="<pad>",
        model_max_length=length,
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=192, n_layer=4, n_head=4, n_positions=length, bos_token_id=0, eos_token_id=0,
        pad_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    for step in range(BASE_STEPS):
        chosen = [lines[index] for index in torch.randint(len(lines), (16,))]
        rows = [torch.tensor([*tokenizer(text)["input_ids"][: length - 1], 0]) for text in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), labels=ids).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / BASE_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
