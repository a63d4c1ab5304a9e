"""Fidelity on the test set, per kind of text: mean, 5th percentile and worst cosine with the original's vectors.

Behind these, Spearman's correlation of the similarities of all pairs of texts. Two null answers are judged beside:
the mean vector for every text, and the vector of another text.

    python benchmarks/judge.py [ARTIFACT ...] [--cache FOLDER] [--development]

Judges the commands of `run.py`, what other tools make, and artifacts that are given, on the texts of
`second_test_set.py`, which nothing was chosen by. Look at them once, with every default frozen: what is chosen after a
look needs a new test set. `--development` judges by those of `test_set.py` instead. Each look is in the ledger
(`looks.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from inputs import model_folder, texts
from looks import take_look
from minilm import alike, artifacts, ways
from results import Results, make_parser
from second_test_set import NAME, open_texts
from test_set import choose_texts, digest_texts

from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact import Artifact
from laconic.data.reader import make_dataset
from laconic.progress import Steps
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task

DEVELOPMENT, ROWS = "750 texts", 150
DEPENDS = (
    "benchmarks/judge.py", "benchmarks/minilm.py", "benchmarks/second_test_set.json", "compress/pipeline.py",
    "compress/quantize", "compress/statistics", "export", "laconic/recipes", "laconic/runtimes/openvino.py",
    "laconic/tasks/text_embedding.py", "constraints.txt",
)  # fmt: skip
"""What decides the figures; when it changes, those that stand on a test set count as older."""


class Closeness(NamedTuple):
    """How near answers are to the original's: cosines, and Spearman's correlation of the similarities of all pairs."""

    mean: float
    fifth: float
    worst: float
    spearman: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}, {self.fifth:.4f}, {self.worst:.4f}; {self.spearman:.4f}"


NULL_ANSWERS: dict[str, Callable[[Array], Array]] = {
    "the mean vector": lambda vectors: np.repeat(vectors.mean(axis=0, keepdims=True), len(vectors), axis=0),
    "the vector of another text": lambda vectors: np.roll(vectors, 1, axis=0),
}
"""From the original's vectors of all texts."""


def main() -> None:
    """Judge and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifacts", nargs="*", type=Path, help="other artifacts of the same model")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    parser.add_argument("--development", action="store_true", help="judge by the texts of test_set.py")
    parser.add_argument("--seen", type=Path, action="append", default=[], help=".jsonl of texts that were healed on")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    folder = arguments.cache
    folder.mkdir(parents=True, exist_ok=True)
    source = model_folder(folder)
    data, _ = texts(folder)
    is_spent = arguments.development
    name, chosen = (DEVELOPMENT, choose_texts(ROWS, [data, *arguments.seen])) if is_spent else (NAME, open_texts())
    made = artifacts(source, data, folder, fast=False)
    made |= {f"`{path.stem}`": Artifact.load(path) for path in arguments.artifacts}
    with ExitStack() as stack:
        sessions = {name: session for name, session, _ in ways(source, made, data, folder, stack)}
        figures = stack.enter_context(take_look(name, digest_texts(chosen), DEPENDS))
        found = dict(judge(sessions, made["`export`"].task(), chosen))
        figures |= {way: str(row["all"]) for way, row in found.items()}
    print(
        f"{', '.join(f'{len(kind)} {name}' for name, kind in chosen.items())}: mean, 5th percentile, worst; Spearman\n"
    )
    results.table("judged", *judgement_rows(found))
    head = ["", "mean", "5th percentile", "worst text", "Spearman"]
    results.table("all texts", head, [[way, *(f"{figure:.4f}" for figure in row["all"])] for way, row in found.items()])


def judgement_rows(found: Mapping[str, dict[str, Closeness]]) -> tuple[list[str], list[list[str]]]:
    """A row for each way, with a column for all texts and one for each kind."""
    names = list(next(iter(found.values())))
    return ["", *names], [[way, *(str(row[name]) for name in names)] for way, row in found.items()]


def judge(
    sessions: Mapping[str, Session], task: Task, chosen: Mapping[str, list[str]]
) -> Iterator[tuple[str, dict[str, Closeness]]]:
    """For each way how near its answers are to the first one's, of all texts and by kind; the first is left out."""
    data = make_dataset([text for kind in chosen.values() for text in kind], task)
    kinds = np.repeat(np.arange(len(chosen)), [len(kind) for kind in chosen.values()])
    (_, original), *others = sessions.items()
    reference = predict(original, task, data)

    def compare(given: Arrays) -> dict[str, Closeness]:
        cosine = task.fidelity(reference, given)
        parts = {"all": np.ones(len(kinds), bool)} | {kind: kinds == number for number, kind in enumerate(chosen)}
        return {name: measure(cosine[part], alike(task, reference, given, part)) for name, part in parts.items()}

    with Steps().step("ask all ways", len(others)) as step:
        for name, session in others:
            yield name, compare(predict(session, task, data))
            step.advance()
    for name, null in NULL_ANSWERS.items():
        yield f"null answer: {name}", compare({key: null(array) for key, array in reference.items()})


def measure(cosine: Array, spearman: float) -> Closeness:
    """Measure the closeness by the cosines of each text, [texts]."""
    return Closeness(cosine.mean(), np.quantile(cosine, 0.05), cosine.min(), spearman)


if __name__ == "__main__":
    main()
