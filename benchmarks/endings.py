"""A task for lm-evaluation-harness that needs no download: which of four endings is a docstring's own?

    python benchmarks/endings.py TEXTS.jsonl FOLDER

Writes `endings.jsonl` and `endings.yaml` into the folder, from the texts of 12 to 40 words. Of four endings one is the
text's own second half, and three are other texts'; choosing at random is right in a quarter.
"""

import argparse
import json
import random
from pathlib import Path

ROWS = 60
TASK = """\
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{beginning}}}}"
doc_to_choice: endings
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def main() -> None:
    """Write the rows and the task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, help="rows with a text")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()
    texts = list(dict.fromkeys(json.loads(line)["text"] for line in lines))
    halves = [divide(words) for text in texts if 12 <= len(words := text.split()) <= 40]
    rng = random.Random(0)
    rng.shuffle(halves)
    halves = halves[:ROWS]
    rows = []
    for beginning, ending in halves:
        endings = [*rng.sample([other for _, other in halves if other != ending], 3), ending]
        rng.shuffle(endings)
        rows.append({"beginning": beginning, "endings": endings, "answer": endings.index(ending)})
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "endings.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (arguments.folder / "endings.yaml").write_text(TASK.format(rows=path.resolve()), encoding="utf-8")


def divide(words: list[str]) -> tuple[str, str]:
    """Divide a text in two."""
    half = len(words) // 2
    return " ".join(words[:half]), " ".join(words[half:])


if __name__ == "__main__":
    main()
