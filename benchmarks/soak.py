"""A server under many requests, of which some are wrong, some are aborted and some arrive slowly.

    python benchmarks/soak.py [--requests 1000000] [--clients 32]

One request in a hundred is wrong (its JSON is cut short, or its tensor has another shape), one is given up by its
client before the answer, and one arrives in five pieces over a second. Every other answer is compared with what was
sent, as the model is an identity. The server's memory, descriptors and threads are read at equal distances.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from results import Results, make_parser
from serving import SIZE, Target, make_request, start_laconic, wait_until_ready

from laconic.commands.http_session import write_request
from laconic.loadtest.http_client import ConnectionFailed, HttpClient

PIECES = 5
SHARE = 0.01
"""Of each kind of fault."""
READINGS = 20
PATH = "/v2/models/echo/infer"


@dataclass(frozen=True)
class Reading:
    """What the server's processes hold. requests: answered so far."""

    requests: int
    resident: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, target: Target, requests: int) -> "Reading":
        """Read it from all processes of a server."""
        processes = [target.process, *target.process.children(recursive=True)]
        return cls(
            requests,
            sum(each.memory_info().rss for each in processes),
            sum(each.num_fds() for each in processes),
            sum(each.num_threads() for each in processes),
        )


class Soak:
    """Sends requests of all kinds until there were as many as asked for. outcomes: how many, by kind and answer."""

    def __init__(self, target: Target, requests: int) -> None:
        self.target = target
        self.left = requests
        self.total = requests
        self.outcomes: Counter[str] = Counter()
        self.readings: list[Reading] = []
        self._url = urlsplit(f"http://127.0.0.1:{target.port}")
        values = np.random.default_rng(0).standard_normal((1, SIZE)).astype(np.float32)
        self._expected = values.tobytes()
        header, body = write_request({"x": values})
        self._good = make_request(PATH, body, f"inference-header-content-length: {header}\r\n")
        _, other = write_request({"x": values[:, 1:]})
        self._bad = [make_request(PATH, b'{"inputs": ['), make_request(PATH, other)]

    async def run(self, clients: int) -> None:
        """Send all requests."""
        await asyncio.gather(*(self._send_in_turn(seed) for seed in range(clients)))

    async def _send_in_turn(self, seed: int) -> None:
        chance = random.Random(seed)
        client = await HttpClient.connect(self._url)
        while self.left > 0:
            self.left -= 1
            if self.left % (self.total // READINGS) == 0:
                self.readings.append(Reading.of(self.target, self.total - self.left))
            kind = chance.random()
            if not client.usable:
                client = await HttpClient.connect(self._url)
            if kind < SHARE:
                self.outcomes[f"wrong: {(await client.send(chance.choice(self._bad))).status}"] += 1
            elif kind < 2 * SHARE:
                client = await self._abort(client, chance)
            elif kind < 3 * SHARE:
                self.outcomes[f"slow: {await self._send_slowly()}"] += 1
            else:
                answer = await client.send(self._good)
                right = answer.status == 200 and answer.body.endswith(self._expected)
                self.outcomes["sound: 200" if right else f"sound: {answer.status}, not what was sent"] += 1
        client.close()

    async def _abort(self, client: HttpClient, chance: random.Random) -> HttpClient:
        """Send a request, hang up before its answer is read, and return a new connection."""
        try:
            await asyncio.wait_for(client.send(self._good), chance.random() * 1e-3)
            self.outcomes["aborted: answered before"] += 1
        except TimeoutError:
            self.outcomes["aborted: gone"] += 1
        return client if client.usable else await HttpClient.connect(self._url)

    async def _send_slowly(self) -> int:
        """The status of a request that arrives in pieces."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target.port)
        step = -(-len(self._good) // PIECES)
        for at in range(0, len(self._good), step):
            writer.write(self._good[at : at + step])
            await writer.drain()
            await asyncio.sleep(1 / PIECES)
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status


def main() -> None:
    """Run it, and print. Exits with 1 where an answer was not the one expected or something grew."""
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=32)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        target = start_laconic(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        asyncio.run(wait_until_ready(target))
        soak = Soak(target, arguments.requests)
        started = time.monotonic()
        asyncio.run(soak.run(arguments.clients))
        seconds = time.monotonic() - started
    results = Results(publish=arguments.publish)
    print(f"\n{arguments.requests:,} requests of {arguments.clients} clients in {seconds:.0f} s:\n")
    results.table(
        "answers", ["kind: answer", "requests"], [[kind, f"{count:,}"] for kind, count in sorted(soak.outcomes.items())]
    )
    print()
    rows = [
        [f"{each.requests:,}", f"{each.resident / 2**20:.1f} MiB", str(each.descriptors), str(each.threads)]
        for each in soak.readings
    ]
    results.table("resources", ["requests", "resident", "descriptors", "threads"], rows)
    settled = soak.readings[len(soak.readings) // 4 :]
    growth = settled[-1].resident - settled[0].resident
    print(f"\nResident memory after the first quarter: {growth / 2**20:+.1f} MiB.")
    unexpected = {kind for kind in soak.outcomes if kind not in EXPECTED}
    sys.exit(bool(unexpected))


EXPECTED = {"sound: 200", "slow: 200", "wrong: 400", "aborted: gone", "aborted: answered before"}
"""Every outcome but a fault of the server."""

if __name__ == "__main__":
    try:
        main()
    except ConnectionFailed as error:
        sys.exit(f"the server refused or dropped a connection that was in order: {error}")
