"""The plan of a training: what each combination takes, the fastest that fits, and the largest batch that would."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from laconic.errors import RecipeError
from laconic.planner.combinations import Candidate, candidates
from laconic.planner.fleet import predict_fleet
from laconic.planner.meta_model import Subject
from laconic.planner.prediction import Prediction, predict
from laconic.planner.rates import Rates, measure
from laconic.progress import Steps
from laconic.training.settings import Training

HEADROOM = 0.05
"""The share of the memory that is left free, for what allocators waste and libraries keep for themselves."""
ALIKE = 1.03
"""Times within this factor are the same: the more exact one is taken, then the one that takes less memory."""
ATTEMPTS = 12
"""Predictions at most in looking for the largest batch."""
WIDEST = 2**26
"""Bytes of the largest batch that is simulated: its inputs are real. What lies beyond is on the line through two."""


@dataclass(frozen=True)
class Row:
    """A combination, and what it is predicted to take."""

    candidate: Candidate
    prediction: Prediction
    shared: bool = False
    """Whether the device is the host, so that what is kept on the host takes the same memory."""

    @property
    def need(self) -> int:
        """Bytes of the memory that is planned for."""
        return self.prediction.peak + (self.prediction.host if self.shared else 0)

    def fits(self, memory: int) -> bool:
        """Whether it stays within so many bytes, HEADROOM left free."""
        return self.need <= memory * (1 - HEADROOM)


@dataclass(frozen=True)
class Plan:
    """rows: the first is plain training. chosen: the fastest that fits; None where none does. largest: rows of a batch
    that still fit with the chosen techniques; None where a batch is taken in parts, so that any fits."""

    subject: Subject
    length: int
    memory: int
    rates: Rates
    rows: tuple[Row, ...]
    chosen: Row | None
    largest: int | None
    devices: int = 1

    def whole(self, row: Row) -> Prediction:
        """The prediction of a row with its course, byte by byte."""
        return foretold(self.subject, row.candidate.training, self.length, self.rates, self.devices, whole=True)

    @property
    def plain(self) -> Row:
        """Training without any technique."""
        return self.rows[0]

    def front(self) -> list[Row]:
        """The rows that no other beats in both memory and time, from the fastest on: of those whose weights all learn,
        and of those where adapters do."""
        kept: list[Row] = []
        for whole in (True, False):
            rows = [row for row in self.rows if row.candidate.whole is whole]
            least = None
            for row in sorted(rows, key=lambda row: (row.prediction.seconds, row.need)):
                if least is None or row.need < least:
                    kept.append(row)
                    least = row.need
        return kept


def plan(
    subject: Subject,
    training: Training,
    *,
    length: int,
    memory: int,
    device: torch.device,
    apart: bool | None = None,
    devices: int = 1,
    steps: Steps | None = None,
    rates: Rates | None = None,
) -> Plan:
    """Predict every combination, and choose. Nothing is allocated, and no weight is read.

    memory: bytes of the device. device: whose speed counts. apart: whether the memory is a device's own, beside the
    host's; by default, whether the device is a GPU. devices: how many share a batch, as the settings' mesh says;
    memory is of each. Raises RecipeError where the model has no room for such texts.
    """
    steps = steps or Steps()
    apart = device.type != "cpu" if apart is None else apart
    if subject.longest is not None and length > subject.longest:
        raise RecipeError(f"{subject.name} takes at most {subject.longest} tokens, and {length} are asked for")
    with steps.step("measure what this device does") as step:
        rates = rates or measure(device)
        step.note = rates.name
    tried = candidates(subject, training, device, devices)
    rows = []
    with steps.step("simulate", len(tried)) as step:
        for candidate in tried:
            rows.append(Row(candidate, foretold(subject, candidate.training, length, rates, devices), shared=not apart))
            step.advance()
        step.note = f"{len(rows)} combinations of {subject.parameters / 1e9:.2f} B parameters"
    chosen = choose(rows, memory, timed=timed(rows[0], rates))
    largest = None
    if chosen:
        with steps.step("find the largest batch"):
            largest = largest_batch(subject, chosen, length, memory, rates, devices)
    return Plan(subject, length, memory, rates, tuple(rows), chosen, largest, devices)


def foretold(
    subject: Subject, training: Training, length: int, rates: Rates, devices: int, *, whole: bool = False
) -> Prediction:
    """The prediction for one device, of as many as there are."""
    if devices == 1:
        return predict(subject, training, length, rates, whole=whole)
    return predict_fleet(subject, training, length, rates, devices, whole=whole)


def timed(row: Row, rates: Rates) -> bool:
    """Whether copies between device and host were: not where the memory is a GPU's and only a processor is here."""
    return row.shared or rates.kind != "cpu"


def choose(rows: Sequence[Row], memory: int, *, timed: bool = True) -> Row | None:
    """The fastest that fits and trains all weights; where none does, the fastest that fits.

    timed: whether copies between device and host were. Where not, what needs none of them goes before what does.
    """
    fitting = [row for row in rows if row.fits(memory)]
    whole = [row for row in fitting if row.candidate.whole] or fitting
    if not whole:
        return None
    if not timed:
        whole = [row for row in whole if not row.prediction.host] or whole
    best = min(row.prediction.seconds for row in whole)
    near = [row for row in whole if row.prediction.seconds <= ALIKE * best]
    return min(near, key=lambda row: (not row.candidate.exact, row.need))


def largest_batch(
    subject: Subject, chosen: Row, length: int, memory: int, rates: Rates, devices: int = 1
) -> int | None:
    """The most rows of a batch that fit with these techniques; None where a batch is taken in parts.

    Memory grows nearly in a line with the rows, so the line through the last two guesses gives the next. No batch of
    more than WIDEST bytes is simulated.
    """
    training = chosen.candidate.training
    if any(named.name == "accumulate" for named in training.techniques):
        return None

    def peak(rows: int) -> int:
        found = foretold(subject, training.model_copy(update={"batch_size": rows}), length, rates, devices)
        return replace(chosen, prediction=found).need

    limit = memory * (1 - HEADROOM)
    row = sum(each.nbytes for each in subject.objective().make_example(1, length).values())
    most = max(2 * training.batch_size, WIDEST // row)
    good, bad = training.batch_size, 0
    known = {good: chosen.need}
    guess = 2 * good
    for _ in range(ATTEMPTS):
        known[guess] = peak(guess)
        good, bad = (max(good, guess), bad) if known[guess] <= limit else (good, guess)
        if bad == good + 1:
            break
        a, b = sorted(known)[-2:] if not bad else (good, bad)
        slope = (known[b] - known[a]) / (b - a)
        aim = int(a + (limit - known[a]) / slope) if slope > 0 else 2 * b
        guess = min(max(aim, good + 1), bad - 1) if bad else max(aim, good + 1)
        if guess > most:
            if most in known:
                return guess
            guess = most
    return good
