"""What padding costs in batches of mixed lengths: the server's batches against those filled in the order of arrival.

    python benchmarks/padding.py ARTIFACT [--runtime ENGINE]

64 requests of one text each wait at a time; each batch that is formed is run by one session with one thread. Both ways
round lengths up alike, have the measured knee as their largest batch, and run the same requests in turns. The padded
batcher puts into a batch whatever comes next. Engine time alone is counted, as processor time.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
from results import Results, make_parser

from laconic.artifacts.artifact import Artifact
from laconic.runtimes.runtime import Session
from serve.batching.layout import Batch, Cap, Layout, Part
from serve.model_repository.model import read_cap

WAITING = 64
MIXES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "even, 4 to 256": lambda rng, count: rng.integers(4, 257, count),
    "texts (log-normal, median 27), 4 to 256": lambda rng, count: np.clip(
        np.exp(rng.normal(3.3, 0.8, count)).astype(int), 4, 256
    ),
}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runtime", default=None)
    parser.add_argument("--knee", type=int, default=None, help="rows; that of the artifact where None")
    parser.add_argument("--requests", type=int, default=300, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    artifact = Artifact.load(arguments.artifact)
    task = artifact.task()
    layout = Layout(artifact.manifest.inputs, artifact.manifest.outputs, task.padding, rounded=True)
    cap = read_cap(artifact)
    if arguments.knee:
        cap = Cap(arguments.knee, arguments.knee * cap.cells // cap.rows)
    results = Results(publish=arguments.publish)
    rows = []
    with artifact.open(arguments.runtime, threads=1) as session:
        for name, draw in MIXES.items():
            lengths = draw(np.random.default_rng(0), arguments.requests)
            parts = [layout.make_part(task.typical(1, int(length), int(length))) for length in lengths]
            found = [
                (run(session, layout, parts, cap, Batch), run(session, layout, parts, Cap(cap.rows), PaddedBatch))
                for _ in range(arguments.rounds)
            ]
            ratios = [padded[0] / dense[0] for dense, padded in found]
            rates = [
                arguments.requests / statistics.median(way[0] for way in ways) for ways in zip(*found, strict=True)
            ]
            rows.append(
                [
                    name,
                    *(f"{rate:.0f}" for rate in rates),
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    *(f"{way[1]:.1%}" for way in found[0]),
                ]
            )
    print(f"\n{artifact.name}, knee {cap.rows}:\n")
    results.table("lengths", ["lengths", "rows per CPU-second", "padded", "ratio (range)", "padding", "padded"], rows)


class PaddedBatch(Batch):
    """A batch that takes whatever comes next."""

    def add(self, part: Part) -> bool:
        if self.parts and self.rows + part.rows > self.cap.rows:
            return False
        self.parts.append(part)
        self.rows += part.rows
        return True


def run(session: Session, layout: Layout, parts: list[Part], cap: Cap, kind: type[Batch]) -> tuple[float, float]:
    """Run all parts. Returns the engine's processor time, in seconds, and the share of padding."""
    arrivals = iter(parts)
    waiting = deque(islice(arrivals, WAITING))
    spent, computed = 0.0, 0
    while waiting:
        batch = kind(layout, cap)
        waiting = deque(part for part in waiting if batch.full or not batch.add(part))
        waiting.extend(islice(arrivals, len(batch.parts)))
        inputs = layout.join_inputs(batch.parts)
        started = time.process_time()
        session.run(inputs)
        spent += time.process_time() - started
        computed += next(iter(inputs.values())).size
    return spent, 1 - sum(part.cells for part in parts) / computed


if __name__ == "__main__":
    main()
