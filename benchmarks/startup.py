"""What it takes: seconds until `--help`, and until a server is ready; its memory; time and memory of a compression.

    python benchmarks/startup.py ARTIFACT ... [--compress]

ARTIFACT: of texts, such as one for each engine. With --compress the default recipe is run with an empty cache, and then
one that calibrates with ten times the samples beside one that does not: its peak must not grow. That takes eight
minutes on two quiet cores.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from inputs import model_folder, texts
from results import Results, make_parser
from server import Served

from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE
from laconic.commands.http_session import start_server
from serve.settings.server_settings import Settings

LACONIC = str(Path(sys.executable).with_name("laconic"))
REQUESTS = 100
STARTS = 7


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--compress", action="store_true", help="measure compression, too")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    results.begin("startup", ["", ""])
    for name, command in (("python -c pass", [sys.executable, "-c", "pass"]), ("laconic --help", [LACONIC, "--help"])):
        results.add("startup", [f"`{name}`, median of 10", f"{seconds_of(command):.2f} s"])
    for path in arguments.artifacts:
        artifact = Artifact.load(path)
        served = f"server of {artifact.name} on {artifact.manifest.placement}"
        ready = statistics.median(seconds_to_ready(artifact) for _ in range(STARTS))
        results.add("startup", [f"{served}, from start to ready, median of {STARTS}", f"{ready:.1f} s"])
        memory = f"{resident(path) / 1e6:.0f} MB"
        results.add("startup", [f"{served}, resident with its worker after {REQUESTS} requests", memory])
    if arguments.compress:
        arguments.cache.mkdir(parents=True, exist_ok=True)
        source = model_folder(arguments.cache)
        data, unseen = texts(arguments.cache)
        judge = arguments.cache / "judge.jsonl"
        judge.write_text("".join(f"{json.dumps({'text': text})}\n" for text in unseen["docstrings"]), encoding="utf-8")
        given = {
            "source": str(source.resolve()),
            "data": {"calibrate": str(data.resolve()), "evaluate": str(judge.resolve())},
        }
        for name, settings in (
            ("default recipe", {}),
            ("256 samples, no layer measured", {"samples": 256, "mixed_precision": False}),
            ("2560 samples, no layer measured", {"samples": 2560, "mixed_precision": False}),
        ):
            seconds, peak = compression(given | {"stages": [{"quantize.static": settings}]})
            cost = f"{seconds:.0f} s, peak {peak / 1e6:.0f} MB"
            results.add("startup", [f"`laconic compress`, empty cache, {name}", cost])


def seconds_of(command: list[str]) -> float:
    """Wall-clock, of a command that succeeds."""
    found = []
    for _ in range(10):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def seconds_to_ready(artifact: Artifact) -> float:
    """Wall-clock, from the start of the command to the line that names the address."""
    start = time.perf_counter()
    with start_server(artifact, "--unproven"):
        return time.perf_counter() - start


def resident(path: Path) -> int:
    """Bytes of a server that has answered questions of all lengths."""
    name = Artifact.load(path).name
    with Served(path, Settings(unproven=True)) as server:
        url = f"http://127.0.0.1:{server.port}/v1/models/{name}/predict"
        for number in range(REQUESTS):
            body = json.dumps({"text": "How do I read a file line by line? " * (1 + number % 30)}).encode()
            with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
                response.read()
        return server.memory()


def compression(recipe: dict[str, object]) -> tuple[float, int]:
    """Seconds and peak bytes of a whole run that finds nothing in the cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        command = [LACONIC, "compress", "--recipe", str(folder / "recipe.yaml"), "-o", str(folder / "out")]
        start = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {VARIABLE: str(folder / "cache")}
        )
        return time.perf_counter() - start, Artifact.load(folder / "out").measured.peak_memory


if __name__ == "__main__":
    main()
