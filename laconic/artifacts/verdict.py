"""The verdict of an artifact: what was compared with what, the figures measured and required, and what follows."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

Check = Literal["", "capture", "engine", "batch"]
"""A check of a step that must not change outputs: the captured graph against the source, the engine against the graph
run node by node, answers in a batch against answers alone. Other comparisons have no name."""

State = Literal["passed", "inconclusive", "failed"]
STATES: tuple[State, ...] = ("passed", "inconclusive", "failed")
"""From the best to the worst, which is the state of a whole."""

FEW = 30
"""Fewer samples prove nothing of those that were not seen: 30 give a share of right answers to 18 points either way."""


class Comparison(BaseModel):
    """One comparison of two models' outputs on the same samples.

    check: which check of a step it is. subject, against: what was compared with what, in words for readers.
    figures: each figure by name; a fidelity of 1 means identical outputs. intervals: 95 % confidence interval of a
    figure. required: the lowest value allowed for a figure. in_doubt: the state where an interval holds the value
    required. needed: about how many samples would end the doubt about a figure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: Check = ""
    subject: str
    against: str
    samples: int
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = {}
    required: dict[str, float] = {}
    in_doubt: Literal["passed", "inconclusive"] = "inconclusive"
    needed: dict[str, int] = {}

    @model_validator(mode="before")
    @classmethod
    def _named_by_subject(cls, data: Any) -> Any:
        """Artifacts of formats 1 and 2 tell the check of the engine by its subject."""
        if isinstance(data, dict) and "check" not in data and data.get("subject") == "engine":
            return data | {"check": "engine"}
        return data

    @model_validator(mode="after")
    def _measured(self) -> Self:
        for kind in ("required", "intervals", "needed"):
            if missing := getattr(self, kind).keys() - self.figures.keys():
                raise ValueError(f"{', '.join(sorted(missing))} is {kind}, and not among the figures")
        return self

    def judge(self, name: str) -> State:
        """Whether a figure reaches its required value: with an interval, as a whole or in no part."""
        low, high = self.intervals.get(name, (self.figures[name],) * 2)
        least = self.required[name]
        if low >= least:
            return "passed"
        return self.in_doubt if high >= least else "failed"

    @property
    def state(self) -> State:
        """The worst state of a figure."""
        return worst_of(self.judge(name) for name in self.required)

    @property
    def passed(self) -> bool:
        """Whether every figure reaches its required value beyond doubt."""
        return self.state == "passed"

    def explain(self, state: State) -> list[str]:
        """A sentence for each figure of that state."""
        return [self.describe(name) for name in self.required if self.judge(name) == state]

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure that is too low."""
        return self.explain("failed")

    def describe(self, name: str) -> str:
        """A sentence with a figure, its interval, what is required, and how many samples would tell."""
        interval = ""
        if name in self.intervals:
            interval = " (95 %: {:.6g} to {:.6g}, {} samples)".format(*self.intervals[name], self.samples)
        sentence = f"{name} is {self.figures[name]:.6g}{interval}, required {self.required[name]:.6g}"
        if self.judge(name) != "inconclusive":
            return sentence
        if name not in self.needed:
            return f"{sentence}: these samples cannot tell"
        return f"{sentence}: too few samples to tell, about {self.needed[name]:,} would"


class Verdict(BaseModel):
    """Whether the artifact's outputs match the original's.

    parity: checks of steps that must not change outputs, with tight tolerances: the captured graph against the module,
    the engine against the graph run node by node. drift: the artifact against the original model, in the task's
    figures, on held-out test samples: first on all of them, then on each kind of sample where the rows name kinds.
    information: whether the artifact's answers still say what the original's do, in figures that answers which do not
    depend on the sample cannot reach.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: tuple[Comparison, ...]
    drift: tuple[Comparison, ...]
    information: tuple[Comparison, ...] = ()

    @property
    def comparisons(self) -> Iterator[Comparison]:
        """All comparisons."""
        return chain(self.parity, self.drift, self.information)

    @property
    def state(self) -> State:
        """The worst state of a comparison; failed where nothing was compared."""
        return worst_of(each.state for each in self.comparisons) if self.parity or self.drift else "failed"

    @property
    def passed(self) -> bool:
        """Whether there was at least one comparison, and all of them passed."""
        return self.state == "passed"

    @property
    def by_reference(self) -> bool:
        """Whether the outputs are those of reference execution, since the engine was not on the machine."""
        return bool(self.drift) and self.find_check("engine") is None

    def find_check(self, check: Check) -> Comparison | None:
        """Return the check of that name; None where it was not made."""
        return next((each for each in self.parity if each.check == check), None)

    @property
    def out_of_domain(self) -> list[str]:
        """A sentence for each kind of sample on which the mean fidelity is below what is required on all samples."""
        whole, kinds = self.drift[:1], self.drift[1:]
        least = max((each.required.get("fidelity", 0.0) for each in whole), default=0.0)
        return [
            f"out-of-domain: {each.subject}: fidelity is {each.figures['fidelity']:.6g}, required on all is {least:.6g}"
            for each in kinds
            if each.figures.get("fidelity", least) < least
        ]

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure that is too low, or one saying that nothing was compared."""
        return self._explain("failed") if self.parity or self.drift else ["nothing was compared"]

    @property
    def doubts(self) -> list[str]:
        """A sentence for each figure of which too few samples tell whether it is high enough."""
        return self._explain("inconclusive")

    @property
    def reasons(self) -> list[str]:
        """The failures, or else the doubts."""
        return self.failures or self.doubts

    def summarize_reasons(self) -> str:
        """The first reason and the number of others, in one line; empty where there is none."""
        first, *rest = self.reasons or [""]
        return f"{first}, and {len(rest)} more" if rest else first

    def describe(self) -> str:
        """The state, with the first reason why it is not passed and the number of others, in one line."""
        return f"{self.state}: {self.summarize_reasons()}" if self.reasons else self.state

    def _explain(self, state: State) -> list[str]:
        return [
            f"{comparison.subject} against {comparison.against}: {sentence}"
            for comparison in self.comparisons
            for sentence in comparison.explain(state)
        ]


def worst_of(states: Iterable[State]) -> State:
    """The worst of some states; passed where there are none."""
    return max(states, key=STATES.index, default="passed")
