"""Running a batch in a session of the engine, so that a part that makes it fail fails alone."""

import logging
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from laconic.arrays import Arrays
from laconic.errors import INTERRUPTS, LaconicError, NotReady, RuntimeFailure, describe_error, list_causes
from laconic.runtimes.runtime import Session
from serve.batching.layout import Layout, Part

OUT_OF_MEMORY = re.compile("out of memory|bad_alloc|failed to allocate|allocation fail", re.IGNORECASE)
"""What engines say; none has an exception of its own for it."""

log = logging.getLogger("laconic.serve")


class EngineRun(NamedTuple):
    """A run of the engine: its rows, when it began and the nanoseconds that it took."""

    rows: int
    started_ns: int
    ns: int


class BatchTiming(NamedTuple):
    """A batch that has run: from when to when, how many parts of requests it had, and the engine's runs for it."""

    started_ns: int
    ended_ns: int
    parts: int
    runs: Sequence[EngineRun]


def run_batch(
    session: Session, layout: Layout, parts: Sequence[Part], runs: list[EngineRun]
) -> list[Arrays | Exception]:
    """Run a batch; return the outputs of each part, or why it has none. runs: where each run of the engine is noted.

    A batch that fails is halved again and again, so that only the part that made it fail fails: of 64, it is found in
    12 runs. Where memory runs out, the rows of a part are halved too.
    """
    started = time.monotonic_ns()
    try:
        answers = layout.split_outputs(session.run(layout.join_inputs(parts)), parts)
    except NotReady as error:  # the engine is gone: which part made it fail, if one did, nobody knows
        return [error] * len(parts)
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - engines raise anything, and the executor must live on
        if len(parts) > 1:
            half = len(parts) // 2
            return run_batch(session, layout, parts[:half], runs) + run_batch(session, layout, parts[half:], runs)
        if parts[0].rows > 1 and is_out_of_memory(error):
            halves = [run_batch(session, layout, [half], runs)[0] for half in layout.halve(parts[0])]
            outputs = [half for half in halves if not isinstance(half, Exception)]
            if len(outputs) == len(halves):
                return [layout.join_outputs(outputs)]
            return [next(half for half in halves if isinstance(half, Exception))]
        return [explain(error)]
    runs.append(EngineRun(sum(part.rows for part in parts), started, time.monotonic_ns() - started))
    return list(answers)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the engine had too little memory for a batch."""
    return any(isinstance(cause, MemoryError) or OUT_OF_MEMORY.search(str(cause)) for cause in list_causes(error))


def explain(error: BaseException) -> LaconicError:
    """Make the error that the client is shown of a failure of the engine, whose own words name nodes of the graph and
    files."""
    log.error("the engine failed: %s", describe_error(error))
    if is_out_of_memory(error):
        return NotReady("the engine has too little memory for these inputs. Send less at a time, or shorter inputs")
    return RuntimeFailure("the engine failed on these inputs; the server's log says why")
