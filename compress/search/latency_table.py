"""How long a layer takes on this machine, by its shape and its precision: measured once for each, and kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.search.layer_spec import Cell
from compress.search.reference_timer import Yardstick
from compress.search.single_layer import alone
from export.build import EngineOption
from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import code_version, hash_of
from laconic.quantization.plan import Precision
from laconic.runtimes.runtime import make_runtime
from laconic.timing.benchmark import TRIAL_BATCHES

NOTHING = Cell("linear", (1, 8), (8, 8))
"""A layer that costs no more than the run that it is in: 45 us in OpenVINO."""

LEAST = 0.02
"""The share of its own run that a layer costs at least."""


@dataclass
class Table:
    """Seconds of a layer by itself, with one engine. The entries are measured when they are asked for first.

    precision: of the layers.
    """

    option: EngineOption
    cache: Cache
    precision: Precision = "int8"
    measured: int = field(default=0)
    """How many were measured in this run, and not found."""

    def seconds(self, cell: Cell, batch: int) -> float:
        """Of one layer like this, for so many samples, one of TRIAL_BATCHES, on one core; less what a run of the engine
        costs whatever is in it, which ten small layers of a model pay once."""
        found, nothing = (
            self._run(cell, self.precision)[str(batch)],
            self._run(NOTHING, "float32")[str(TRIAL_BATCHES[0])],
        )
        return max(found - nothing, LEAST * found)

    def _run(self, cell: Cell, precision: Precision) -> dict[str, float]:
        """Seconds of a graph of this layer alone, by batch."""
        engine = make_runtime(self.option.runtime)
        key = hash_of(
            "cell",
            cell.signature,
            TRIAL_BATCHES,
            precision,
            self.option.name,
            engine.version(),
            this_machine().model_dump(),
            code_version(),
        )

        def measure() -> dict[str, float]:
            self.measured += 1
            yardstick = Yardstick(self.option, self.cache)
            with alone(cell, self.option, precision) as (session, drawn):
                return {str(size): yardstick.timed(session, drawn(size)) for size in TRIAL_BATCHES}

        return dict(self.cache.json(f"cell-{key}", measure))

    def total(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Seconds of all of them, by batch."""
        return {batch: sum(each.count * self.seconds(each, batch) for each in cells) for batch in TRIAL_BATCHES}
