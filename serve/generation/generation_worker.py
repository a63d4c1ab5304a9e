"""A model that writes, from the side of the server: requests go to a worker process, and its events come back.

A worker that dies ends its own requests with an error, and is started again; requests that wait for room go on waiting.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from laconic.errors import NotReady
from laconic.runtimes.generator import BlockLedger, EncoderInputs, GenerationRequest, Sampling, TokenEvent
from serve.generation.admission import Admission
from serve.generation.generation_job import GenerationJob
from serve.generation.generation_process import GenerationProcess
from serve.generation.generation_statistics import GenerationStatistics
from serve.generation.packed_inputs import pack_inputs
from serve.generation.token_stream import TokenEvents, TokenStream
from serve.generation.worker_adapters import WorkerAdapters
from serve.workers.child_process import ERRORS
from serve.workers.supervisor import Report, Supervisor
from serve.workers.worker_process import WorkerLost

SILENCE = 8
"""How many times the patience of other models: a step reads up to 256 tokens of prompts, 32 of which are worth one."""
SAVING = 30.0
"""Seconds that a prefix cache may take to be written."""

log = logging.getLogger("laconic.serve")


class GenerationWorker:
    """Writes in a worker process. Used from one event loop, and closed from any thread.

    watchdog: seconds; crashes: in a row, after which the worker is not started again; most_waiting: requests that may
    wait for room in the cache. statistics: of the model by itself. adapters: LoRA adapters beside it. source_tokens: as
    that of the generator.
    """

    def __init__(self, job: GenerationJob, *, watchdog: float, crashes: int, most_waiting: int) -> None:
        self.job = job
        self.statistics = GenerationStatistics()
        self.adapters = WorkerAdapters(self._send)
        self.admission = Admission(BlockLedger(0, 1), most_waiting)
        self.most_waiting = most_waiting
        self.source_tokens = 0
        self._silence = SILENCE * watchdog
        self._crashes = crashes
        self._ids = itertools.count()
        self._streams: dict[int, TokenStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: GenerationProcess | None = None
        self._reason = "the engine is being started"
        self._restart_at = 0.0
        self._closed = threading.Event()
        self._supervisor = Supervisor(
            "the worker", self._run_worker, self._closed, on_crash=self._note_crash, max_crashes=crashes
        )

    @classmethod
    def open(cls, job: GenerationJob, *, watchdog: float, crashes: int, most_waiting: int) -> "GenerationWorker":
        """Start the worker. Raises its error where it does not open the model."""
        worker = cls(job, watchdog=watchdog, crashes=crashes, most_waiting=most_waiting)
        worker._supervisor.start()
        try:
            report: Any = worker._supervisor.ready.result()
        except BaseException:
            worker.close()
            raise
        assert report is not None  # nobody else has the worker yet, and could close it
        worker.admission.ledger = BlockLedger(report["blocks"], report["block_tokens"])
        worker.source_tokens = report["source_tokens"]
        if report["note"]:
            log.warning("%s: %s", job.model, report["note"])
        return worker

    @property
    def reason(self) -> str:
        """Why nothing can be written at present; empty where something can."""
        return self._reason

    @property
    def running(self) -> int:
        """The number of requests that hold blocks of the cache."""
        return len(self._streams)

    @property
    def process(self) -> int | None:
        """The process identifier of the worker, where it runs."""
        process = self._process
        return None if process is None else process.process.pid

    async def begin(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        timeout: float,
        events: TokenEvents,
        key: str = "",
        source: EncoderInputs | None = None,
        adapter: int = 0,
        statistics: GenerationStatistics | None = None,
    ) -> TokenStream:
        """Begin to write, once there is room in the cache; the stream is to be cancelled if it is not read to its end.
        timeout: seconds that the request may wait. events: where what is written goes. key: the name of whose it is.
        source: what an encoder-decoder reads. adapter: its number among `adapters`, 0 for the model by itself;
        statistics: where its tokens are counted.

        Raises InputError for what can never fit, Overloaded, DeadlineExceeded, and NotReady while no engine runs.
        """
        self._loop = asyncio.get_running_loop()
        self.check_running()
        request = GenerationRequest(next(self._ids), prompt, sampling, source, adapter)
        stream = TokenStream(request, self._cancel, events, statistics or self.statistics)
        await self.admission.enter(request, timeout, key)
        stream.began = time.monotonic_ns()
        self._streams[request.id] = stream
        stream.statistics.prompt_tokens += request.read_tokens
        packed = {"id": request.id, "prompt": prompt, "sampling": asdict(sampling), "source": pack_inputs(source)}
        self._send({"add": packed | {"adapter": adapter}})
        return stream

    def check_running(self) -> None:
        """Raise NotReady while no engine runs."""
        if self._reason:
            raise WorkerLost(self._reason, self._restart_at - time.monotonic())

    def close(self) -> None:
        """End the worker, whatever it writes. Where nothing is written, its prefix cache is kept."""
        self._closed.set()
        is_open, self._reason = not self._reason, "the model is closed"
        process = self._process
        if process is not None:
            if self.job.prefixes and is_open and not self._streams:
                process.end(SAVING)
            process.close()
        if self._supervisor.ident is not None:
            self._supervisor.join()

    def _cancel(self, request_id: int, choice: int | None) -> None:
        self._send({"cancel": [request_id, choice]})

    def _send(self, command: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None:
            process.send(command)

    def _run_worker(self, set_ready: Callable[[Report], None]) -> str:
        """Run the worker to its end. Returns how it ended. Raises what keeps it from opening the model."""
        process = GenerationProcess(self.job)
        self._process = process
        try:
            if self._closed.is_set():
                return "was ended"
            report = process.wait_until_open()
            self.adapters.restore()
            self._reason = ""
            set_ready(report)
            self._on_loop(self.admission.reopen)
            try:
                return process.follow(self._silence, self._pass_on)
            finally:
                self._reason = "the engine has just stopped"  # what is said until it is known why
                self._on_loop(self._lose)
                self.adapters.lose()
        finally:
            process.close()

    def _pass_on(self, events: list[Any]) -> None:
        """Pass events on to the event loop, and what was loaded to whoever waits for it."""
        loaded = [event for event in events if isinstance(event, dict) and "adapter" in event]
        for report in loaded:
            self.adapters.settle(report)
        if len(loaded) < len(events):
            self._on_loop(self._deliver, [event for event in events if event not in loaded] if loaded else events)

    def _note_crash(self, reason: str, delay: float | None) -> None:
        """Note why the worker crashed, for requests and the log. delay: seconds until it is started again."""
        if delay is None:
            self._reason = f"the engine stopped {self._crashes} times in a row, and is not started again: {reason}"
            self._on_loop(self.admission.fail, NotReady(self._reason))
        else:
            self._restart_at = time.monotonic() + delay
            self._reason = f"the engine is being started again: {reason}"
        log.error("%s: %s", self.job.model, self._reason)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop of the requests call something, if there has been a request and it still runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _lose(self) -> None:
        """End the requests of a worker that is gone."""
        self.admission.close()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.open_choices.clear()
            stream.put(WorkerLost("the engine stopped while it wrote this answer. Try again"))

    def _deliver(self, events: list[Any]) -> None:
        """Hand events to their streams, and release the blocks of choices that have ended."""
        now = time.monotonic_ns()
        for event in events:
            if isinstance(event, dict):
                self._refuse(event)
            elif (stream := self._streams.get(event[0])) is not None:
                request_id, choice, tokens, logprobs, reason, likeliest, error, scores, cached, drafted, accepted = (
                    event
                )
                self._count(stream, choice, len(tokens), now)
                stream.statistics.drafted_tokens += drafted
                stream.statistics.accepted_tokens += accepted
                if cached is not None:
                    stream.cached_tokens = cached
                    stream.statistics.cached_tokens += cached
                if reason is not None:
                    stream.open_choices.discard(choice)
                    self.admission.release(request_id, choice, (now - stream.began) * 1e-9)
                    if not stream.open_choices:
                        del self._streams[request_id]
                if error:
                    stream.put(NotReady(error))
                    continue
                stream.put(TokenEvent(request_id, choice, tokens, logprobs, reason, likeliest, prompt_scores=scores))

    def _count(self, stream: TokenStream, choice: int, tokens: int, now: int) -> None:
        """Count the tokens that a step wrote; several share its time."""
        if tokens:
            waited, is_first = stream.time_token(choice, now)
            statistics = stream.statistics
            if is_first:
                statistics.first_token.observe(waited)
            else:
                for _ in range(tokens):
                    statistics.between_tokens.observe(waited // tokens)
            statistics.generated_tokens += tokens

    def _refuse(self, report: Mapping[str, Any]) -> None:
        """End a request that the worker refuses."""
        stream = self._streams.pop(report["id"], None)
        if stream is not None:
            for choice in sorted(stream.open_choices):
                self.admission.release(stream.request.id, choice)
            stream.open_choices.clear()
            error = ERRORS.get(report["kind"])
            stream.put(error(report["error"]) if error is not None else NotReady(report["error"]))
