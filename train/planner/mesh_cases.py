"""What is simulated to predict meshes of any size: a few small ranks, beyond which all figures are linear."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from laconic.errors import RecipeError
from train.offload.memory_accounting import CATEGORIES, Category
from train.parallel.mesh import AxisSizes, Mesh, ScheduleName
from train.parallel.pipeline_schedules import SCHEDULES, check_rows, check_tied, choose_rows
from train.parallel.stage_plan import TracedModel, check_layers
from train.planner.device_rates import DeviceRates
from train.planner.memory_prediction import MemoryPrediction, count_rows, sum_categories
from train.planner.meta_model import MetaModel
from train.planner.stage_footprint import Place, StageCase, sum_costs
from train.settings import Training

EXACT_ROWS, EXACT_RANKS, EXACT_LAYERS = 8, 4, 2
"""Up to so many rows, ranks along an axis, and layers of a stage, a case is simulated as it is. Larger ones are on the
line through half as many and this number."""
BASE_SHARD, BASE_ROWS = 2, EXACT_ROWS // 2
"""Ranks with all layers are simulated with so many shards, and so many rows, where only one of both matters."""


@dataclass(frozen=True)
class RankCase:
    """A rank with all layers that is simulated, the first of a mesh. copies: whether there are any. shard: None without
    shards. What copies of shards take is what the shards take (`tests/test_fleet.py`)."""

    copies: bool
    shard: int | None
    rows: int
    tensor: int
    context: int = 1

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is on."""
        return Mesh(replicate=2 if self.copies else 1, shard=self.shard or 1, context=self.context, tensor=self.tensor)


Case = StageCase | RankCase


@dataclass(frozen=True)
class MeshJob:
    """What all cases of a plan have in common. traced: None for a model that no pipeline takes, for the reason
    `refusal`. tied: bytes of the weights that the first and the last stage have in common."""

    model: MetaModel
    training: Training
    length: int
    rates: DeviceRates
    traced: TracedModel | None
    refusal: str = ""
    tied: int = 0


@dataclass(frozen=True)
class StageLayout:
    """Which stages a pipeline has. micro_rows: rows of a micro-batch. layers: of each stage. places: their ranks."""

    schedule: ScheduleName
    micro_rows: int
    micro_batches: int
    layers: tuple[int, ...]
    places: tuple[int, ...]

    def name_place(self, stage: int) -> Place:
        """Name the place of a stage."""
        return "first" if stage == 0 else "last" if stage == len(self.layers) - 1 else "middle"


def arrange_stages(job: MeshJob, sizes: AxisSizes, schedule: ScheduleName) -> StageLayout:
    """Arrange the stages of a pipeline. Raises RecipeError where the rows or the layers do not suffice."""
    if job.traced is None:
        raise RecipeError(job.refusal)
    rows = count_rows(job.training, sizes)
    micro = job.training.components().micro_batch or choose_rows(rows, sizes.pipeline, schedule)
    check_rows(rows, micro, sizes.pipeline, schedule)
    if sizes.replicate * sizes.shard > 1:
        check_tied(job.traced.before & job.traced.after, schedule)
    places = SCHEDULES[schedule].place_stages(sizes.pipeline)
    check_layers(job.model.module, len(job.traced.flops) - 2, len(places))
    layers = tuple(map(len, job.traced.cut(len(places)).layers))
    return StageLayout(schedule, min(micro, rows), ceil(rows / micro), layers, tuple(places))


def list_stage_cases(layout: StageLayout, stage: int, tensor: int) -> list[tuple[float, StageCase]]:
    """List the cases of which a stage is the weighted sum."""
    place = layout.name_place(stage)
    axes = spread(layout.layers[stage], EXACT_LAYERS), spread(layout.micro_rows, EXACT_ROWS), spread_ranks(tensor)
    return [
        (prod((a, b, c)), StageCase(place, layers, rows, ranks))
        for (a, layers), (b, rows), (c, ranks) in product(*axes)
    ]


def list_rank_cases(training: Training, sizes: AxisSizes) -> list[tuple[float, RankCase]]:
    """List the cases of which a rank with all layers is the weighted sum. What shards take does not depend on the rows,
    so that BASE_SHARD of them is simulated with the rows, and other numbers with BASE_ROWS."""
    rows, micro = count_rows(training, sizes), training.components().micro_batch
    row_terms = spread_rank_rows(rows) if micro is None else [(1.0, min(rows, 2 * micro))]
    is_sharded = sizes.shard > 1 or (sizes.replicate > 1 and sizes.tensor > 1)
    cases: dict[RankCase, float] = {}

    def add(weight: float, shard: int | None, rows: int, tensor: int) -> None:
        case = RankCase(sizes.replicate > 1 and (shard or 1) == 1, shard, rows, tensor, sizes.context)
        cases[case] = cases.get(case, 0.0) + weight

    for weight, tensor in spread_ranks(sizes.tensor):
        for share, number in row_terms:
            add(weight * share, BASE_SHARD if is_sharded else None, number, tensor)
        for share, shard in spread_ranks(sizes.shard) if is_sharded else []:
            base = BASE_ROWS if micro is None else row_terms[0][1]
            add(weight * share, shard, base, tensor)
            add(-weight * share, BASE_SHARD, base, tensor)
    return [(weight, case) for case, weight in cases.items() if weight]


def spread_rank_rows(rows: int) -> list[tuple[float, int]]:
    """Return a number of rows as a weighted sum of numbers that ranks with all layers are simulated with: few, since
    these take the longest."""
    if rows in (1, BASE_ROWS, EXACT_ROWS):
        return [(1.0, rows)]
    weight = (rows - BASE_ROWS) / (EXACT_ROWS - BASE_ROWS)
    return [(1 - weight, BASE_ROWS), (weight, EXACT_ROWS)]


def spread(value: int, exact: int) -> list[tuple[float, int]]:
    """Return a number as a weighted sum of numbers that are simulated."""
    if value <= exact:
        return [(1.0, value)]
    low, weight = exact // 2, (value - exact // 2) / (exact - exact // 2)
    return [(1 - weight, low), (weight, exact)]


def spread_ranks(ranks: int) -> list[tuple[float, int]]:
    """Return a number of ranks, whose parts are its inverse, as a weighted sum of numbers that are simulated."""
    if ranks <= EXACT_RANKS:
        return [(1.0, ranks)]
    low, high = EXACT_RANKS // 2, EXACT_RANKS
    weight = (1 / ranks - 1 / low) / (1 / high - 1 / low)
    return [(1 - weight, low), (weight, high)]


def combine_predictions(terms: Iterable[tuple[float, MemoryPrediction]]) -> MemoryPrediction:
    """Return the weighted sum of predictions, part by part of the step: the peak may be in another."""
    pairs = list(terms)
    names = set.intersection(*(set(prediction.parts) for _, prediction in pairs))
    parts: dict[str, dict[Category, int]] = {
        name: {
            kind: round(sum(weight * prediction.parts[name][kind] for weight, prediction in pairs))
            for kind in CATEGORIES
        }
        for name in sorted(names)
    }
    at_peak = max(parts.values(), key=sum_categories)
    host = round(sum(weight * prediction.host for weight, prediction in pairs))
    cost = sum_costs((weight, prediction.cost) for weight, prediction in pairs)
    return MemoryPrediction(sum_categories(at_peak), host, at_peak, parts, cost)
