"""What `sequence: true` saves of the memory of a rank, predicted, as docs/past-one-device.md has it.

    python benchmarks/sequence_memory.py

The rank is one of four that share the layers of the Llama of 1 B parameters of benchmarks/mesh_table.py: ROWS rows of
4,096 tokens, AdamW. One process predicts it, as `laconic plan` does; no weight is read.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mesh_table import LENGTH, ROWS, make_rates, write_config
from results import Results, make_parser

from train.planner.meta_model import MetaModel, open_meta_model
from train.planner.prediction import predict_rank
from train.settings import Training

RANKS = 4
TECHNIQUES: Sequence[Sequence[str]] = ((), ("bf16",), ("bf16", "gradient-checkpointing"))


def predict_bytes(model: MetaModel, techniques: Sequence[str], *, sequence: bool) -> int:
    """Predict the bytes of a rank at the peak of its step."""
    mesh = {"tensor": RANKS, "sequence": sequence}
    training = Training.model_validate({"batch_size": ROWS, "techniques": techniques, "mesh": mesh})
    return predict_rank(model, training, LENGTH, make_rates(), RANKS).peak


def main() -> None:
    """Print a row for each set of techniques."""
    results = Results(publish=make_parser(__doc__).parse_args().publish)
    results.begin("sequence", ["techniques", f"`tensor: {RANKS}`", "with `sequence: true`"])
    with tempfile.TemporaryDirectory() as folder:
        model = open_meta_model(write_config("1B", Path(folder)))
        for techniques in TECHNIQUES:
            sizes = [predict_bytes(model, techniques, sequence=sequence) for sequence in (False, True)]
            names = ", ".join(f"`{name}`" for name in techniques) or "none"
            results.add("sequence", [names, *(f"{size / 2**30:.1f} GiB" for size in sizes)])


if __name__ == "__main__":
    main()
