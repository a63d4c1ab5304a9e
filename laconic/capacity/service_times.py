"""Service times of a running server: of its engine by batch size, and of its own processor time for a request."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import SplitResult

from laconic.capacity.pace import Pace, measure_pace
from laconic.errors import RuntimeFailure
from laconic.loadtest.traffic import OK, Load

FLOOD = 48
"""Clients that fill batches to the brim."""
SHORTEST = 1e-6
"""Seconds: no service is shorter."""
PROCESSES = Path("/proc")


Series = tuple[tuple[float, ...], ...]
"""Times of services of one kind. Those of a series ran one after the other, and are in this order."""


@dataclass(frozen=True)
class ServiceTimes:
    """What a server takes to serve, in seconds.

    executors: batches that run at a time. cap: rows of the largest batch. alone, together: the engine's times by the
    rows of a batch, while it is the only batch and while all executors run one. cpu: processor time of the server
    itself for a request. delay: what is left of a request's time, and occupies nothing. change: what the engine takes
    longer for a batch behind one of another size. inline: whether batches run where the server reads its requests.
    """

    executors: int
    cap: int
    alone: Mapping[int, Series]
    together: Mapping[int, Series]
    cpu: float
    delay: float = 0.0
    change: float = 0.0
    inline: bool = False

    @cached_property
    def pace(self) -> Pace:
        """The pace of the machine while one batch ran after the other: a series for each round, through all sizes, so
        that slow phases which are longer than the measurement of one size stay whole."""
        middles = take_medians(self.alone)
        rounds = zip(*(self.alone[rows] for rows in middles), strict=True)
        return Pace(
            tuple(
                tuple(chain.from_iterable(map(measure_pace, middles.values(), series_of_sizes)))
                for series_of_sizes in rounds
            )
        )

    @cached_property
    def capacity(self) -> float:
        """The requests a second that no server with these times can exceed."""
        batches = max(rows / seconds for rows, seconds in self._work[True].items())
        if self.inline:
            return self.pace.mean / (self.cpu + 1 / batches)
        return self.pace.mean * min(self.executors * batches, 1 / max(self.cpu, SHORTEST))

    def work(self, rows: int, *, together: bool) -> float:
        """Return the engine's time for a batch of so many rows in the median, between the sizes that were measured."""
        seconds = self._work[together]
        sizes = list(seconds)
        place = min(bisect_left(sizes, rows), len(sizes) - 1)
        upper = seconds[sizes[place]]
        if sizes[place] <= rows or place == 0:
            return upper
        lower, below = seconds[sizes[place - 1]], sizes[place - 1]
        return lower + (upper - lower) * (rows - below) / (sizes[place] - below)

    @cached_property
    def _work(self) -> dict[bool, dict[int, float]]:
        return {False: take_medians(self.alone), True: take_medians(self.together)}


def take_medians(times: Mapping[int, Series]) -> dict[int, float]:
    """Return the median time of each size, the sizes sorted."""
    return {rows: median(time for series in times[rows] for time in series) for rows in sorted(times)}


def pool(rounds: Sequence[ServiceTimes]) -> ServiceTimes:
    """Pool the times of several rounds with one server."""
    first = rounds[0]

    def join(parts: Sequence[Mapping[int, Series]]) -> dict[int, Series]:
        return {rows: tuple(series for part in parts for series in part[rows]) for rows in parts[0]}

    return ServiceTimes(
        executors=first.executors,
        cap=first.cap,
        alone=join([each.alone for each in rounds]),
        together=join([each.together for each in rounds]),
        cpu=fmean(each.cpu for each in rounds),
        delay=fmean(each.delay for each in rounds),
        change=fmean(each.change for each in rounds),
        inline=first.inline,
    )


class ServerProbe:
    """Measures a server on this machine, whose only model it loads.

    process: its id. make_request: a request of so many rows. ask: the JSON of a route of the model, "/config".
    """

    def __init__(
        self,
        place: SplitResult,
        process: int,
        make_request: Callable[[int], bytes],
        ask: Callable[[str], Awaitable[Any]],
        seconds: float,
    ) -> None:
        self._place = place
        self._process = process
        self._make_request = make_request
        self._ask = ask
        self._seconds = seconds

    async def measure(self, rounds: int) -> list[ServiceTimes]:
        """Measure in so many rounds."""
        config = await self._ask("/config")
        inline = config["parameters"]["inline"]["string_value"] == "true"
        executors = 1 if inline else config["instance_group"][0]["count"]
        await self._run([1], FLOOD)
        cap = max(await self._read_batches())
        return [await self._measure_round(executors, cap, inline=inline) for _ in range(rounds)]

    async def _measure_round(self, executors: int, cap: int, *, inline: bool) -> ServiceTimes:
        sizes = sorted({*(2**power for power in range(cap.bit_length())), cap})
        alone: dict[int, Series] = {}
        together: dict[int, Series] = {}
        delay, cpu = 0.0, 0.0
        for rows in sizes:
            times, overhead, spent = await self._measure(rows, 1)
            alone[rows] = together[rows] = (times,)
            if rows == 1:
                delay = max(0.0, overhead - spent)
            if executors > 1:
                times, _, spent = await self._measure(rows, executors)
                together[rows] = (times,)
            cpu = spent if rows == 1 else cpu
        change = await self._measure_change(sizes)
        return ServiceTimes(executors, cap, alone, together, cpu, delay, change, inline)

    async def _measure_change(self, sizes: Sequence[int]) -> float:
        """Measure what the engine takes longer for a batch behind one of another size, in the mean: for another shape,
        OpenVINO prepares its kernels again."""
        times = await self._run([rows for rows in sizes for _ in range(2)], 1)
        changed, same = ([times[2 * place + part :: 2 * len(sizes)] for place in range(len(sizes))] for part in (0, 1))
        pairs = [pair for pair in zip(changed, same, strict=True) if all(pair)]
        if len(sizes) < 2 or not pairs:
            return 0.0
        return max(0.0, fmean(median(first) - median(second) for first, second in pairs))

    async def _measure(self, rows: int, clients: int) -> tuple[tuple[float, ...], float, float]:
        """Load with requests of so many rows. Return the engine's times in their order; the mean of what a request
        takes besides, and the server's processor time of that."""
        before, cpu = await self._read_batches(), read_cpu_seconds(self._process)
        times = await self._run([rows], clients)
        spent = sum_spent(cpu, read_cpu_seconds(self._process))
        # Of all sizes: while the machine is slow, a server may take the rows of a request apart.
        engine = (sum((await self._read_batches()).values()) - sum(before.values())) / len(times)
        overhead = max(0.0, fmean(times) - engine)
        return tuple(max(SHORTEST, time - overhead) for time in times), overhead, spent / len(times)

    async def _run(self, sizes: Sequence[int], clients: int) -> list[float]:
        load = Load(self._place, [self._make_request(rows) for rows in sizes])
        samples = await load.run_closed(clients, self._seconds)
        failures = {sample.outcome for sample in samples} - {OK}
        if failures:
            raise RuntimeFailure(f"the server answered {', '.join(sorted(failures))} while it was measured")
        return [sample.ended - sample.due for sample in samples]

    async def _read_batches(self) -> dict[int, float]:
        """Read how many seconds the engine has run batches of each size."""
        statistics = (await self._ask("/stats"))["model_stats"][0]["batch_stats"]
        return {each["batch_size"]: 1e-9 * each["compute_infer"]["ns"] for each in statistics}


def read_cpu_seconds(process: int) -> dict[str, float]:
    """Read the processor time of each thread of a process, by its id. Raises RuntimeFailure where the system does not
    count it."""
    try:
        threads = (PROCESSES / str(process) / "task").glob("*/schedstat")
        return {path.parent.name: 1e-9 * int(path.read_text().split()[0]) for path in threads}
    except (OSError, IndexError) as error:
        raise RuntimeFailure(f"the processor time of the server cannot be read: {error}") from None


def sum_spent(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Sum the processor time that threads spent between two readings, without those that ended meanwhile."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
