"""What came of a load: throughput, latencies, errors."""

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from laconic.loadtest.traffic import OK, Sample

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class LoadPoint(BaseModel):
    """The result of one load.

    load: "clients" (closed loop) or "rate" (open loop, requests per second), and `value` its size. seconds: from the
    first request to the last answer. requests: all that were sent. goodput: answers with status 200 per second.
    latencies: of these, in milliseconds, by percentile; in an open loop from the time that the request was due. errors:
    requests without such an answer, by status or reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    load: str
    value: float
    seconds: float
    requests: int
    goodput: float
    latencies: dict[str, float]
    errors: dict[str, int]

    @classmethod
    def of(cls, load: str, value: float, samples: Sequence[Sample]) -> "LoadPoint":
        """Summarize the samples of one load."""
        seconds = max(sample.ended for sample in samples) - min(sample.due for sample in samples)
        times = sorted(sample.ended - sample.due for sample in samples if sample.outcome == OK)
        return cls(
            load=load,
            value=value,
            seconds=seconds,
            requests=len(samples),
            goodput=len(times) / seconds,
            latencies={f"p{percent:g}": 1e3 * find_percentile(times, percent) for percent in PERCENTILES if times},
            errors=dict(Counter(sample.outcome for sample in samples if sample.outcome != OK)),
        )


def find_percentile(times: Sequence[float], percent: float) -> float:
    """The smallest of the sorted values that so many percent are not larger than."""
    return times[max(0, -int(-len(times) * percent // 100) - 1)]
