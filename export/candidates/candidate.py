"""The choice of a plan and an engine: per engine the first plan that meets the goal, then the fastest of these."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from export.candidates.engine_option import EngineOption
from export.report.report import PRECISIONS, CandidateLine
from laconic.arrays import Array
from laconic.quantization.plan import BITS, HALF, INTEGER, Plan, PrecisionLadder, name_cache
from laconic.runtimes.product import Product, share_multiply_adds
from laconic.timing.measurements import Timing
from laconic.units import format_bytes, format_fidelity

ADVANTAGE = 1.05
"""How much faster a less preferred engine must be to be chosen. Smaller differences vary from run to run, so the same
input would not give the same artifact. At 1.1, MiniLM with a third of its feed-forward units got 5.94 x, where 6.33 x
was available at the same fidelity."""

FAITHFUL_ADVANTAGE = 1.02
"""How much faster a less preferred engine with a higher mean fidelity must be to be chosen. INT8 with BF16 beside it
was 3.4 and 5.4 % faster than with FP32 in two races of MiniLM on a Xeon with AMX, at 0.9983 against 0.9979: with one
margin for all, chance chose."""


@dataclass(frozen=True)
class EngineCandidate:
    """A plan, built for an engine.

    fidelity: per validation sample, [samples]. met: whether it meets the goal. arithmetic: the share of the weights
    that each arithmetic multiplies with, as the engine reports it. products: each with the kernel that runs. speedup:
    over the original, 1 until it is timed. divergence: the mean over the validation samples.
    """

    option: EngineOption
    plan: Plan
    model: Path
    fidelity: Array
    met: bool
    arithmetic: Mapping[str, float] = field(default_factory=dict)
    products: tuple[Product, ...] = ()
    speedup: float = 1.0
    divergence: float = 0.0

    @property
    def name(self) -> str:
        """The name shown to users: engine, arithmetic, and whether only the weights, or nothing, is quantized. Unique
        within a run."""
        if self.is_plain:
            return f"{self.option.name}, not quantized"
        precisions = set(self.plan.precision.values())
        if precisions <= HALF:
            return self.option.name
        if "float8" in precisions:
            return f"{self.option.name}, FP8"
        return self.option.name if self.is_integer else f"{self.option.name}, weight-only"

    @property
    def is_integer(self) -> bool:
        """Whether at least one layer computes in INT8."""
        return bool(INTEGER & set(self.plan.precision.values()))

    @property
    def is_plain(self) -> bool:
        """Whether nothing was quantized."""
        return set(self.plan.precision.values()) <= {"float32"}

    @property
    def is_quick(self) -> bool:
        """Whether it meets the goal, is smaller than the float graph, and no slower than the original."""
        return self.met and not self.is_plain and self.speedup >= 1


def pair_ladders(
    ladder: PrecisionLadder, options: Sequence[EngineOption]
) -> Iterator[tuple[PrecisionLadder, EngineOption]]:
    """Yield each engine option with the part of the ladder to try on it, the preferred first.

    On a CPU BF16 also goes from the top of one rung to the top of the next, where nothing is multiplied in INT8:
    weights in fewer bits and no arithmetic in INT8 is more faithful, and where the processor multiplies matrices of
    BF16 no slower (MiniLM with half of its heads and feed-forward units, batch 8, Xeon with AMX: 38 ms, and 53 ms in
    INT8). That is a way round arithmetic in INT8: where the recipe asks for weights alone, every candidate has as many
    of them in as few bits as the goal allows.
    """
    tops = PrecisionLadder(
        tuple((rung[-1],) for rung in ladder.rungs if not INTEGER & set(rung[-1].precision.values()))
    )
    choice = has_choice(ladder)
    yield from ((tops, option) for option in options if choice and not option.on_gpu and option.compute == "bfloat16")
    yield from ((ladder, option) for option in options)


def pair_float_graph(
    ladder: PrecisionLadder, options: Sequence[EngineOption]
) -> Iterator[tuple[PrecisionLadder, EngineOption]]:
    """Yield each engine option of the CPU with the float graph: the way back where a model is so small that INT8 costs
    more than it saves, which is known only when the smaller candidates were timed."""
    last = PrecisionLadder.of(ladder.rungs[-1][-1])
    yield from (
        (last, option) for option in options if has_choice(ladder) and not option.on_gpu and option.compute == "float32"
    )


def has_choice(ladder: PrecisionLadder) -> bool:
    """Return whether there is a way round arithmetic in INT8."""
    return len(ladder.rungs) > 1 and bool(INTEGER & set(ladder.rungs[0][0].precision.values()))


def prefer_int8(candidates: Sequence[EngineCandidate], share: float) -> Sequence[EngineCandidate]:
    """Return the candidates that meet the goal with at least `share` of the multiply-adds in INT8; if there is none,
    those that meet it with the most, and all where none meets it."""
    shares = [share_multiply_adds(each.products).get("int8", 0.0) for each in candidates]
    most = max((part for each, part in zip(candidates, shares, strict=True) if each.met), default=0.0)
    least = min(share, most)
    return [each for each, part in zip(candidates, shares, strict=True) if each.met and part >= least] or candidates


def choose_fastest(candidates: Sequence[EngineCandidate]) -> EngineCandidate:
    """Choose the fastest candidate that meets the goal; a less preferred engine must be faster by ADVANTAGE, or by
    FAITHFUL_ADVANTAGE if its mean fidelity is higher. The graph without quantization is chosen only if all smaller
    candidates are slower than the original. If none meets the goal, choose the one with the highest fidelity."""
    meeting = [candidate for candidate in candidates if candidate.met]
    if not meeting:
        return max(candidates, key=lambda candidate: float(candidate.fidelity.mean()))
    best, *others = [candidate for candidate in meeting if candidate.is_quick] or meeting
    for candidate in others:
        better = candidate.fidelity.mean() > best.fidelity.mean()
        if candidate.speedup > best.speedup * (FAITHFUL_ADVANTAGE if better else ADVANTAGE):
            best = candidate
    return best


def describe_missed(chosen: EngineCandidate) -> str | None:
    """Return a sentence if no candidate meets the goal, so that the most faithful one was chosen, else None."""
    if chosen.met:
        return None
    return (
        f"no candidate meets the goal with the margin that the samples to choose by must keep: {chosen.name} was "
        f"taken, which is the most faithful ({format_fidelity(float(chosen.fidelity.mean()))}). Set a lower goal "
        f"(--fidelity), or give more or other samples"
    )


def describe_unmet(asked: Plan, chosen: Plan) -> str | None:
    """Return a sentence if layers were to have fewer bits than 8 and at most half of them do, else None. asked: the
    smallest plan. chosen: the one that was chosen."""
    small = [node for node, precision in asked.precision.items() if BITS[precision] < BITS["int8-weight"]]
    kept = [node for node in small if BITS[chosen.precision[node]] < BITS["int8-weight"]]
    if 2 * len(kept) > len(small) or not small:
        return None
    return (
        f"4 bits were asked for, and {len(kept)} of {len(small)} layers have them: with more, the fidelity on the "
        f"samples to choose by is below the goal. Set a lower goal (--fidelity), a smaller group_size, or "
        f"mixed_precision: false to have them in any case"
    )


def describe_float_cache(asked: Plan, chosen: Plan) -> str | None:
    """Return a sentence if keys and values were to be kept in fewer bits than they are, else None."""
    for key, kept in (("int4_value_cache", "values in 4 bits"), ("int8_kv_cache", "keys and values in 8 bits")):
        if getattr(asked, key) and not getattr(chosen, key):
            cache = "has 8 bits" if chosen.int8_kv_cache else "stays in float"
            return (
                f"{key}: the cache {cache}: with {kept} the goal is missed on the samples to choose by. Set a lower "
                f"goal (--fidelity)"
            )
    return None


def mean_speedup(timings: Sequence[Timing]) -> float:
    """Compute the geometric mean of the speed-ups at several batch sizes."""
    return geometric_mean(timing.speedup for timing in timings)


def format_candidate(candidate: EngineCandidate, *, chosen: bool) -> CandidateLine:
    """Format a candidate as a row of the report. chosen: whether it became the artifact."""
    counts = Counter(candidate.plan.precision.values())
    layers = [f"{counts[each]} {PRECISIONS.get(each, each)}" for each in BITS if each in counts]
    cache = name_cache(candidate.plan.int8_kv_cache, candidate.plan.int4_value_cache)
    files = candidate.model.parent.glob(f"{candidate.model.stem}.*")
    return CandidateLine(
        engine=candidate.name,
        size=format_bytes(sum(file.stat().st_size for file in files)),
        layers=", ".join(filter(None, [*layers, cache])),
        mean=format_fidelity(float(candidate.fidelity.mean())),
        worst=format_fidelity(float(candidate.fidelity.min())),
        speedup=f"{candidate.speedup:.2f}",
        met=candidate.met,
        chosen=chosen,
        shares=share_multiply_adds(candidate.products),
    )
