"""The plan of a mesh: the predicted memory, bubble and traffic of each that divides the model, and the fastest that
fits."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from laconic.errors import RecipeError, UsageError
from laconic.progress import Steps
from laconic.units import parse_bytes
from train.parallel.mesh import AxisSizes, Mesh, ScheduleName
from train.parallel.pipeline_schedules import SCHEDULES
from train.parallel.tensor_plan import make_plan
from train.planner.device_rates import DeviceRates, measure_optimizer, measure_rates
from train.planner.memory_prediction import HEADROOM, SAME_TIME, MemoryPrediction
from train.planner.mesh_cases import Case, MeshJob, RankCase
from train.planner.mesh_prediction import MeshPrediction, list_cases, predict_mesh
from train.planner.meta_model import MetaModel
from train.planner.parallel_map import map_parallel
from train.planner.prediction import predict_rank
from train.planner.stage_footprint import StageCase, StageFootprint
from train.planner.stage_simulation import make_job, simulate_stage
from train.settings import Training
from train.step.compatibility import find_conflict

LINKS: Mapping[str, float] = {"nvlink": 450e9, "infiniband": 50e9, "ethernet": 3.125e9}
"""Bytes a second that a rank sends: NVLink 4 of an H100 in one direction, NDR InfiniBand (400 Gbit/s), and Ethernet of
25 Gbit/s."""
RATE = re.compile(r"(.+?)\s*/\s*s")


@dataclass(frozen=True)
class Link:
    """What connects the ranks. rate: bytes a second that each of them sends."""

    name: str
    rate: float


def parse_link(value: str) -> Link:
    """Parse the name of a link, or its rate as "12GB/s". Raises UsageError."""
    if value in LINKS:
        return Link(value, LINKS[value])
    match = RATE.fullmatch(value)
    try:
        return Link(value, float(parse_bytes(match[1] if match else None)))
    except ValueError:
        raise UsageError(f"link {value!r} is not known; expected {', '.join(LINKS)}, or a rate as 12GB/s") from None


@dataclass(frozen=True)
class CaseSimulator:
    """Simulates cases, in any process."""

    job: MeshJob

    def simulate(self, case: Case) -> StageFootprint | MemoryPrediction:
        """Simulate a case. Raises RecipeError where it does not exist."""
        if isinstance(case, StageCase):
            return simulate_stage(self.job, case)
        job, mesh = self.job, self.job.training.mesh
        sizes = {"precision": mesh.precision, "offload": mesh.offload}
        mesh = case.mesh.model_copy(update=sizes if case.shard is not None else {})
        data_world = prod((mesh.replicate or 1, mesh.shard or 1))
        world, rows = data_world * mesh.context * mesh.tensor, case.rows * data_world
        training = job.training.model_copy(update={"mesh": mesh, "batch_size": rows})
        return predict_rank(job.model, training, job.length, job.rates, world)

    def try_case(self, case: Case) -> StageFootprint | MemoryPrediction | str:
        """Simulate a case; the message of the RecipeError where it does not exist, as results travel from process to
        process."""
        try:
            return without_timeline(self.simulate(case))
        except RecipeError as error:
            return str(error)


def without_timeline(result: StageFootprint | MemoryPrediction) -> StageFootprint | MemoryPrediction:
    """Return a result without its timeline, which is large."""
    return replace(result, timeline=None) if isinstance(result, MemoryPrediction) else result


@dataclass(frozen=True)
class MeshRow:
    """A mesh and its prediction. seconds: of a step. shared: whether device and host are the same memory."""

    mesh: Mesh
    prediction: MeshPrediction
    seconds: float
    shared: bool

    @property
    def need(self) -> int:
        """Bytes that the rank with the most needs of the planned memory."""
        return self.prediction.need + (self.prediction.host if self.shared else 0)

    def fits(self, memory: int) -> bool:
        """Return whether it fits into `memory` bytes with HEADROOM to spare."""
        return self.need <= memory * (1 - HEADROOM)


@dataclass(frozen=True)
class MeshPlan:
    """rows: the fastest first. chosen: the fastest that fits; None where none does. memory: bytes of each device."""

    model: MetaModel
    training: Training
    length: int
    devices: int
    memory: int
    link: Link
    rates: DeviceRates
    rows: tuple[MeshRow, ...]
    chosen: MeshRow | None

    @property
    def has_device_times(self) -> bool:
        """Whether the times are those of the device whose memory is planned."""
        return self.rows[0].shared or self.rates.kind != "cpu"

    def find_pareto_front(self) -> list[MeshRow]:
        """Find the rows that no other beats in both memory and time, fastest first."""
        front: list[MeshRow] = []
        for row in self.rows:
            if not front or row.need < front[-1].need:
                front.append(row)
        return front


def plan_mesh(
    model: MetaModel,
    training: Training,
    *,
    length: int,
    devices: int,
    memory: int,
    link: Link,
    device: torch.device,
    apart: bool | None = None,
    steps: Steps | None = None,
    rates: DeviceRates | None = None,
    workers: int = 1,
) -> MeshPlan:
    """Predict every mesh of `devices` ranks that divides the model, and choose. No rank exists, and no weight is read.

    Arguments as of `plan_memory`. Raises RecipeError where no mesh is possible, with the reason of the last.
    """
    steps = steps or Steps()
    apart = device.type != "cpu" if apart is None else apart
    if model.longest is not None and length > model.longest:
        raise RecipeError(f"{model.name} takes at most {model.longest} tokens, and {length} are asked for")
    with steps.step("measure the device's speed") as step:
        rates = rates or measure_rates(device)
        measure_optimizer(training.components().optimizer, rates)
        step.note = rates.name
    job = make_job(model, training, length, rates)
    possible, reason = list_possible(job, devices)
    cases = list(dict.fromkeys(case for needed in possible.values() for case in needed))
    cases.sort(key=lambda case: isinstance(case, RankCase))  # the longest, which start first, are the last
    with steps.step("simulate", len(cases)) as step:
        simulated: dict[Case, Any] = {}
        for index, result in map_parallel(CaseSimulator(job).try_case, cases, workers=workers):
            simulated[cases[index]] = result
            step.advance()
        step.note = f"{len(possible)} meshes, of {len(cases)} ranks"
    rows = []
    for mesh, needed in possible.items():
        failed = [simulated[case] for case in needed if isinstance(simulated[case], str)]
        if failed:
            reason = failed[0]
            continue
        prediction = predict_mesh(job, mesh.resolve(devices), mesh.schedule, simulated)
        rows.append(MeshRow(mesh, prediction, prediction.count_seconds(link.rate), not apart))
    if not rows:
        raise RecipeError(reason or f"no mesh of {devices} ranks divides {model.name}")
    rows.sort(key=lambda row: (row.seconds, row.need))
    chosen = choose_mesh(rows, memory)
    return MeshPlan(model, training, length, devices, memory, link, rates, tuple(rows), chosen)


def choose_mesh(rows: Sequence[MeshRow], memory: int) -> MeshRow | None:
    """Choose the fastest that fits; of some that are nearly as fast, the one that needs the least memory."""
    fitting = [row for row in rows if row.fits(memory)]
    near = [row for row in fitting if row.seconds <= SAME_TIME * fitting[0].seconds]
    return min(near, key=lambda row: row.need, default=None)


def list_possible(job: MeshJob, devices: int) -> tuple[dict[Mesh, list[Case]], str]:
    """List the meshes that divide the model and the batch, with the cases of each, and the reason why the last other
    one does not."""
    possible: dict[Mesh, list[Case]] = {}
    reason = ""
    components = job.training.components()
    for mesh in list_meshes(job, devices):
        sizes = mesh.resolve(devices)
        conflict = find_conflict(
            components.techniques,
            components.optimizer,
            max_grad_norm=job.training.max_grad_norm,
            parallelism=mesh.parallelism if devices > 1 else (),
            ema=job.training.ema,
        )
        if conflict:
            reason = conflict
            continue
        try:
            possible[mesh] = list(dict.fromkeys(list_cases(job, sizes, mesh.schedule)))
        except RecipeError as error:
            reason = str(error)
    return possible, reason


def list_meshes(job: MeshJob, devices: int) -> Iterator[Mesh]:
    """Yield the meshes of so many ranks whose tensor axis divides the layers of the model; where the recipe has
    `context`, those with as many ranks along it."""
    context = job.training.mesh.context
    if context > 1:
        for shard in list_divisors(devices // context if devices % context == 0 else 0):
            sizes = AxisSizes(replicate=devices // context // shard, shard=shard, context=context)
            yield make_mesh(job.training.mesh, sizes, "1f1b")
        return
    for tensor in list_divisors(devices):
        if tensor > 1:
            try:
                make_plan(job.model.module, tensor)
            except RecipeError:
                continue
        for pipeline in list_divisors(devices // tensor):
            rest = devices // (tensor * pipeline)
            for shard in list_divisors(rest):
                sizes = AxisSizes(pipeline, rest // shard, shard, tensor=tensor)
                # Parts of layers take one stage on a rank.
                names = [name for name, kind in SCHEDULES.items() if tensor == 1 or kind.stages == 1]
                schedules: Iterable[ScheduleName] = names if pipeline > 1 else ("1f1b",)
                yield from (make_mesh(job.training.mesh, sizes, schedule) for schedule in schedules)


def make_mesh(like: Mesh, sizes: AxisSizes, schedule: ScheduleName) -> Mesh:
    """Make a mesh, with the precision, the place of shards and the compression of another where it has a use for
    them."""
    is_plain = sizes.shard == sizes.tensor == sizes.pipeline == 1
    return Mesh(
        **sizes._asdict(),
        schedule=schedule,
        compress=like.compress if is_plain else None,
        precision=like.precision if sizes.shard > 1 else None,
        offload=like.offload and sizes.shard > 1,
    )


def list_divisors(number: int) -> list[int]:
    """List the divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def describe_mesh(row: MeshRow) -> str:
    """Describe a mesh in a few words."""
    schedule = f", {row.prediction.schedule}" if row.prediction.schedule else ""
    return f"{row.prediction.sizes}{schedule}"
