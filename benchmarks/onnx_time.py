"""The time of `laconic compress` for three trained ONNX models of public packages, beside the budget: four times the
file's own inference over the samples, plus one minute.

    python benchmarks/onnx_time.py [--only NAME ...] [--folder FOLDER]

Each starts with an empty cache. The file's own inference is ONNX Runtime with one thread, one sample a run, in the same
process tree just before. Prints wall and processor seconds, since other programs on the machine lengthen the former.
"""

import os
import resource
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime as ort
from onnx_packages import PACKAGES, fetch
from results import Results, make_parser

from laconic.arrays import Arrays

SHAPES = {"file types (tf2onnx)": 400, "quality of speech (keras2onnx)": 150, "lines of text (paddle2onnx)": 200}
"""Samples of each: 2,048 bytes of a file; 9 seconds of sound; a line of 48 x 320 pixels."""


def time_original(path: Path, inputs: Arrays) -> tuple[float, float]:
    """Return the wall and the processor seconds of a file's own inference over the samples."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = [
        {name: array[row : row + 1] for name, array in inputs.items()}
        for row in range(len(next(iter(inputs.values()))))
    ]
    session.run(None, feeds[0])
    wall, processor = time.perf_counter(), time.process_time()
    for feed in feeds:
        session.run(None, feed)
    return time.perf_counter() - wall, time.process_time() - processor


def time_compress(path: Path, samples: Path, scratch: Path) -> tuple[float, float]:
    """Return the wall and the processor seconds of `laconic compress` with an empty cache."""
    command = ["laconic", "compress", str(path), "--data", str(samples), "-o", str(scratch / "made.laconic")]
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=os.environ | {"LACONIC_CACHE": str(scratch / "cache")}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a Markdown table with a row for each model."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--folder", type=Path, default=Path(".onnx-packages"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    results = Results(publish=options.publish)
    head = ["model", "samples", "own inference, s (processor)", "budget, s", "compress, s (processor)", "load"]
    results.begin("time", head)
    for name in options.only:
        path, inputs = fetch(PACKAGES[name], options.folder), PACKAGES[name].make(SHAPES[name])
        with TemporaryDirectory() as scratch:
            samples = Path(scratch) / "samples.npz"
            np.savez(samples, **inputs)  # type: ignore[arg-type]
            own, own_processor = time_original(path, inputs)
            wall, processor = time_compress(path, samples, Path(scratch))
        cells = [name, str(SHAPES[name]), f"{own:.1f} ({own_processor:.1f})", f"{4 * own + 60:.0f}"]
        results.add("time", [*cells, f"{wall:.0f} ({processor:.0f})", f"{os.getloadavg()[0]:.1f}"])


if __name__ == "__main__":
    main()
