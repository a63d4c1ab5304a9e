"""A candidate on its way: foreseen, cut, healed, built, or lost on the way, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.search.constraints import Aim, Figures
from compress.search.finish import Built
from compress.search.forecast import Prediction
from compress.search.study import described
from compress.search.trial import Outcome
from laconic.artifacts.gain import amount, milliseconds
from laconic.timing.measurements import TrialRecord


@dataclass(eq=False)
class Candidate:
    """settings: of the cut. heals: steps of each healing that it went through. outcome: of cut and healing so far. cut:
    the figures before any healing.
    shortfall: how far off its answers are, in times what is allowed. left: the share that the last healing has left of
    that, or of its infidelity, whichever is less: right answers are counted, and come and go by ones. failed: its
    infidelity when an artifact of it failed. reason: why it lost; empty while it did not."""

    settings: Mapping[str, float]
    prediction: Prediction
    heals: tuple[int, ...] = ()
    outcome: Outcome | None = None
    cut: Figures | None = None
    shortfall: float = float("inf")
    left: float = 0.0
    built: Built | None = None
    failed: float = float("inf")
    reason: str = ""

    @property
    def name(self) -> str:
        """For people."""
        healed = f", healed {sum(self.heals)} steps" if self.heals else ""
        return described(self.settings) + healed

    @property
    def figures(self) -> Figures | None:
        """The newest that there are: of the artifact, or of the module."""
        return self.built.figures if self.built else self.outcome.figures if self.outcome else None

    @property
    def infidelity(self) -> float:
        """Of the module; infinite before it was cut."""
        return 1 - self.outcome.figures.fidelity if self.outcome and self.outcome.figures else float("inf")

    def ahead(self, other: "Candidate") -> bool:
        """Whether it is foreseen to be as fast as another, was as faithful when it was cut, and one of them more so."""
        if self.cut is None or other.cut is None:
            return False
        mine = (self.prediction.speedup, self.cut.fidelity)
        theirs = (other.prediction.speedup, other.cut.fidelity)
        return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))

    def beyond(self, other: "Candidate") -> bool:
        """Whether it takes more than another: no slower, and no more faithful when it was cut."""
        if self.cut is None or other.cut is None:
            return False
        return self.prediction.speedup >= other.prediction.speedup and self.cut.fidelity <= other.cut.fidelity

    def take(self, outcome: Outcome, aim: Aim) -> None:
        """What came of the cut, or of one more healing."""
        before, self.outcome = self.figures, outcome
        if outcome.figures is None:
            self.reason = self.reason or outcome.error
            return
        shortfall = aim.shortfall(outcome.figures)
        if before is not None:
            missing = share(1 - outcome.figures.fidelity, 1 - before.fidelity)
            self.left = min(share(shortfall, self.shortfall), missing)
        self.shortfall = shortfall
        self.cut = self.cut or outcome.figures

    @property
    def told(self) -> tuple[float, float] | None:
        """What a study is told: how unfaithful it was when it was cut, and how slow; None where that is not known."""
        return None if self.cut is None else (1 - self.cut.fidelity, 1 / self.prediction.speedup)

    def lost(self, best: "Candidate", front: Sequence["Candidate"], aim: Aim) -> str:
        """What it lost by, where nothing was held against it by itself. front: of those that were cut."""
        rank = "faster" if aim.speed else "better"
        if self.built:
            return wrong(aim, self.built) or f"{best.name} is {rank}"
        ahead = next((each for each in front if each.ahead(self)), None)
        if ahead is not None:
            return f"{described(ahead.settings)} is as fast, and was more faithful when it was cut"
        assert self.figures is not None
        said = unfaithful(aim, self.figures)
        return f"{said}; not healed further" if said else f"{best.name} is {rank}"

    def trial(self, reason: str) -> TrialRecord:
        """As shown. reason: why it was taken, or lost."""
        made, found = self.built or self.prediction, self.figures
        return TrialRecord(
            name=self.name,
            settings=dict(self.settings),
            heal=sum(self.heals),
            fidelity=found.fidelity if found else None,
            drop=found.drop if found else None,
            latency=made.latency,
            size=max(made.size, 0.0),
            speedup=made.speedup,
            measured=self.built is not None,
            foretold=self.prediction.speedup if self.built and self.settings else None,
            reason=reason,
        )


def share(now: float, before: float) -> float:
    """What is left of a number."""
    return now / before if before > 0 else 1.0


def excess(aim: Aim, made: Built | Prediction) -> str:
    """What is too slow or too large for the goal, in words; empty where nothing is."""
    word = "" if isinstance(made, Built) else "predicted "
    found = []
    if aim.max_latency is not None and made.latency > aim.max_latency:
        found.append(f"{word}{milliseconds(made.latency)}, the goal is {milliseconds(aim.max_latency)}")
    if aim.max_size is not None and made.size > aim.max_size:
        found.append(f"{word}{amount(made.size)}, the goal is {amount(aim.max_size)}")
    return "; ".join(found)


def unfaithful(aim: Aim, found: Figures) -> str:
    """What of the answers is too far off, in words; empty where nothing is."""
    if aim.shortfall(found) <= 1:
        return ""
    if aim.max_drop is not None and found.doubtful is not None and found.doubtful > aim.max_drop:
        assert found.drop is not None
        return f"drop {found.drop:.2%}, {found.doubtful:.2%} with its doubt, the goal is {aim.max_drop:.2%}"
    assert aim.tolerance is not None
    return f"fidelity {found.fidelity:.4f}, worst {found.worst:.4f}, asked for {aim.tolerance.describe()}"


def wrong(aim: Aim, made: Built) -> str:
    """What an artifact misses, in words; empty where it misses nothing."""
    missing = [excess(aim, made), unfaithful(aim, made.figures), *made.failures]
    if not any(missing) and aim.certain and aim.uncertain(made.highest):
        missing.append(f"drop up to {made.highest:.2%} (95 %), the goal is {aim.max_drop:.2%}")
    return "; ".join(dict.fromkeys(each for each in missing if each))


def better(aim: Aim, made: Built, other: Built | None) -> bool:
    """Whether an artifact is to be taken in place of another: one that misses nothing before one that does, the faster
    or the more faithful as the aim prefers; of two that miss the goal, the one nearer to it."""
    if other is None:
        return True
    misses = [bool(wrong(aim, each)) for each in (made, other)]
    if misses[0] != misses[1]:
        return misses[1]
    if misses[0]:
        far, further = (max(aim.shortfall(e.figures), aim.excess(e.latency, e.size)) for e in (made, other))
        return far < further
    if aim.speed:
        # Each was timed in turns with the original. Seconds of two moments do not compare: where the machine had become
        # slower in between, a network of 6.2 x lost to one of 5.3 x.
        return made.speedup > other.speedup
    return made.figures.fidelity > other.figures.fidelity


def cheap_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other was ahead of when they were cut."""
    return [each for each in candidates if not any(other.ahead(each) for other in candidates)]
