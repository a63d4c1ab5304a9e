"""The figures of docs/performance-*.md, measured again here.

    python benchmarks/run.py [--fast] [--json FILE]

All ways to run a model take turns in one run, with one thread each, so that what else the machine does hits them alike;
speed-ups are medians of the ratio per round, with its quartiles. Fidelity is found on texts that are set aside before
`laconic` gets the others. It takes a quarter of an hour on two quiet cores.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import digit_images
import minilm
from inputs import model_folder, texts
from results import Results, make_parser

from laconic.hardware import this_machine

HERE = Path(__file__).parent
PACKAGES = ("laconic", "torch", "transformers", "onnxruntime", "openvino", "numpy")


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--fast", action="store_true", help="fewer texts and rounds, coarser figures")
    parser.add_argument("--rounds", type=int, default=None, help="how often each way is run: 21, or 5 with --fast")
    parser.add_argument("--batches", default="1,8,32", help="batch sizes, with commas between them")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file, too")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    rounds = arguments.rounds or (5 if arguments.fast else 21)
    sizes = [int(size) for size in arguments.batches.split(",")]
    folder = arguments.cache
    folder.mkdir(parents=True, exist_ok=True)
    source = model_folder(folder)
    data, unseen = texts(folder, 600 if arguments.fast else None)
    made = minilm.artifacts(source, data, folder, fast=arguments.fast)
    found: dict[str, Any] = {
        "machine": this_machine().model_dump(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "rounds": rounds,
        "minilm": minilm.measure(source, made, data, unseen, folder, rounds, sizes),
    }
    show_minilm(found, results)
    found["digits"] = digit_images.measure(folder, rounds, sizes)
    show_digits(found["digits"], results)
    server: list[str | Path] = [
        sys.executable,
        HERE / "server.py",
        made["`compress`"].path,
        "--rounds",
        str(min(rounds, 5)),
    ]
    found["server"] = subprocess.run(server, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(f"\n### Over HTTP\n\n```text\n{found['server']}```")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1, default=float) + "\n", encoding="utf-8")


def show_minilm(found: dict[str, Any], results: Results) -> None:
    """The tables of MiniLM, in Markdown."""
    machine, model = found["machine"], found["minilm"]
    print(f"\n{machine['processor']}, {machine['cores']} cores ({', '.join(machine['features'])}),", end=" ")
    print(f"{machine['memory'] / 2**30:.0f} GiB; {', '.join(f'{k} {v}' for k, v in found['versions'].items())}.")
    length = model["timings"][0]["length"]
    print(f"\n### MiniLM: speed\n\n{length} tokens, one thread, {found['rounds']} rounds, medians and quartiles.\n")
    results.table("MiniLM: speed", *minilm.speed_rows(model["timings"]))
    print("\nWhat people choose between, at batch 8:\n")
    results.table("MiniLM: summary", *minilm.summary_rows(model["fidelity"], model["timings"]))
    counts = " and ".join(f"{count} {kind}" for kind, count in model["unseen"].items())
    print(f"\n### MiniLM: fidelity\n\nOn {counts}, none of which `laconic` was given.\n")
    results.table("MiniLM: fidelity", *minilm.fidelity_rows(model["fidelity"]))
    print("\nSize, and independence of the batch:\n")
    results.table("MiniLM: batches", *minilm.batch_rows(model["fidelity"]))
    print("\nBy kind of text:\n")
    results.table("MiniLM: by kind", *minilm.kind_rows(model["fidelity"]))


def show_digits(network: dict[str, Any], results: Results) -> None:
    """The table of the digits network, in Markdown."""
    print(f"\n### Digits\n\nAccuracy on {network['images']} images that neither training nor `laconic` used.\n")
    head, speed = minilm.speed_rows(network["timings"])
    results.table(
        "digits", ["", "MB", "accuracy", "change (95 % interval)", *head[1:]], digit_images.rows(network, speed)
    )


if __name__ == "__main__":
    main()
