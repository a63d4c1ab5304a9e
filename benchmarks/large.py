"""What a 1.1 B model needs, by technique, and how long it takes to say so, up to 8 B; nothing is allocated.

    python benchmarks/large.py [--only table peers] [--cache .cache/bench]

A GPT-2 of 20 layers, 2,048 wide, without dropout; 8 rows of 1,024 tokens. The baseline is plain FP32 training with
AdamW (foreach), fused attention and torch's cross_entropy, as PyTorch and transformers do by default. Step times are
worked out from what this machine was measured to do, so they are a processor's, where copies to the host cost little;
all are relative to the baseline, and in a table of their own.

Beside it what the usual tools reach on one device: FSDP2 with its CPU offload, simulated like the rest; and DeepSpeed's
ZeRO-Offload and ZeRO-Infinity by DeepSpeed's own formulas of weights, gradients and optimizer state
(`estimate_zero2_model_states_mem_needs` and zero3's of DeepSpeed 0.19.8, whose factor of 1.5 for buffers on the host is
left out; Ren et al., arXiv 2101.06840; Rajbhandari et al., arXiv 2104.07857), plus the activations and temporaries that
are predicted for the same means here.

Then the memory of each rank of a fleet that shares an 8 B Llama in shards, as one process predicts it.
"""

import time
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
import training as shared
from results import Results, make_parser
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from training import Model, settings, spoken

from laconic.tasks.token_positions import IGNORED
from train.parallel.mesh import Mesh
from train.planner.combinations import list_combinations
from train.planner.device_rates import DeviceRates, measure_rates
from train.planner.memory_prediction import MemoryPrediction
from train.planner.meta_model import MetaModel
from train.planner.prediction import predict, predict_rank
from train.settings import Training
from train.step.objective import Objective

GIB = 2**30
ROWS, TOKENS = 8, 1024
BASELINE = {"adamw": {"implementation": "foreach"}}
USUAL, EXACT = "as usual, with torch's cross_entropy", "exact, on the device"
ACCUMULATE = {"gradient-accumulation": {"rows": 1}}
CHUNK = {"chunked-cross-entropy": {"defer": True, "chunk": 256}}
LEAN = ("sdpa", "gradient-checkpointing", ACCUMULATE)
LAYERED = ("sdpa", {"layerwise": {"rows": 1, "snapshots": 4}}, CHUNK, "optimizer-in-backward")
HOSTED = ("sdpa", "chunked-cross-entropy", {"layerwise": {"rows": 1, "snapshots_on": "host"}})
ON_HOST = {dtype: (*HOSTED, {"host-weights": {"dtype": dtype}}) for dtype in ("fp32", "bf16")}
TABLE: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    (USUAL, ("sdpa",), BASELINE),
    (USUAL, (), BASELINE),
    (EXACT, ("sdpa",), BASELINE),
    (EXACT, (), "adamw"),
    (EXACT, ("sdpa",), "adamw"),
    (EXACT, ("gradient-checkpointing",), "adamw"),
    (EXACT, ({"gradient-checkpointing": {"policy": "selective"}},), "adamw"),
    (EXACT, (ACCUMULATE,), "adamw"),
    (EXACT, ("chunked-cross-entropy",), "adamw"),
    (EXACT, ("optimizer-in-backward",), "adamw"),
    (EXACT, ({"layerwise": {"rows": 1}},), "adamw"),
    (EXACT, LEAN, "adamw"),
    (EXACT, ("sdpa", "chunked-cross-entropy", "gradient-checkpointing", ACCUMULATE), "adamw"),
    (EXACT, ("sdpa", "chunked-cross-entropy", "gradient-checkpointing", "optimizer-in-backward"), "adamw"),
    (EXACT, LAYERED, "adamw"),
    ("exact, with the host", ("activation-offload",), "adamw"),
    ("exact, with the host", ON_HOST["fp32"], "adamw"),
    ("near", ("bf16",), "adamw"),
    ("near", ("fp16",), "adamw"),
    ("near", (), "adamw-8bit"),
    ("near", (), "adamw-4bit"),
    ("near", ("pure-bf16",), {"adamw": {"stochastic_rounding": True}}),
    ("near", ("sdpa", "chunked-cross-entropy", "bf16", "gradient-checkpointing", ACCUMULATE), "adamw-8bit"),
    ("near", ON_HOST["bf16"], "adamw"),
    ("another optimizer", (), "sgd"),
    ("another optimizer", (), "adafactor"),
    ("another optimizer", (), "lion"),
    ("another optimizer", (), "apollo"),
    ("another optimizer", ("sdpa", "chunked-cross-entropy", "pure-bf16", "gradient-checkpointing",
                           "optimizer-in-backward"),
     {"adafactor": {"stochastic_rounding": True}}),
    ("adapters", ("lora",), "adamw"),
    ("adapters", ("qlora",), "adamw"),
    ("adapters", ("sdpa", "chunked-cross-entropy", {"lora": {"base_dtype": "bfloat16"}}, "bf16",
                  "gradient-checkpointing", ACCUMULATE), "adamw"),
    ("adapters", ("sdpa", "chunked-cross-entropy", "qlora", "bf16", "gradient-checkpointing", ACCUMULATE), "adamw"),
)  # fmt: skip
"""What kind of training it is, its techniques and its optimizer."""
DIGEST: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("AdamW in FP32, fused attention", ("sdpa",), BASELINE),
    ("checkpointing and micro-batches of one row", LEAN, "adamw"),
    ("layer by layer, update in the backward pass", LAYERED, "adamw"),
    ("weights on the host", ON_HOST["fp32"], "adamw"),
)
"""What some combinations are called in short; the first is with torch's cross_entropy."""
FSDP2 = "FSDP2 with CPU offload and a fused loss, for comparison"
LEANER = ", micro-batches of 1 row, fused linear cross-entropy"
MEANS, LEANER_MEANS = ("sdpa", "gradient-checkpointing"), (ACCUMULATE, "chunked-cross-entropy")
PARTS = ("digest", "table", "peers", "speed", "fleet")
SIZES = ("device, GiB", "reduction", "host, GiB", "reduction of both")
RANKS = (8, 64, 1024)
OFFLOAD, OFFLOAD_BF16 = Mesh(shard=None, offload=True), Mesh(shard=None, precision="bf16", offload=True)
MESHES = (Mesh(shard=None), Mesh(shard=None, precision="bf16"), OFFLOAD_BF16)


class UsualModel(MetaModel):
    """A model that is trained with torch's cross_entropy."""

    def objective(self) -> Objective:
        found: Any = super().objective()
        found.cross_entropy = torchs_cross_entropy
        return cast(Objective, found)


def torchs_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None
) -> Tensor:
    """A `LinearCrossEntropy`, as transformers computes it."""
    return cross_entropy(linear(hidden, weight, bias).float(), targets, ignore_index=IGNORED, reduction="sum")


def usual(subject: MetaModel) -> MetaModel:
    """The same model, trained with torch's cross_entropy."""
    return UsualModel(**vars(subject))


def digest(model: Model, rates: DeviceRates, results: Results) -> None:
    """Print the memory of a few combinations with the same losses."""
    rows = []
    for words, choice, optimizer in DIGEST:
        subject = usual(model.subject) if optimizer is BASELINE else model.subject
        rows.append((words, predict(subject, settings(choice, optimizer, ROWS), TOKENS, rates)))
    rows.append((FSDP2, offload(model, OFFLOAD, LEANER_MEANS, rates)))
    cells = [[words, f"{found.peak / GIB:.2f}", f"{found.host / GIB:.2f}"] for words, found in rows]
    results.table("digest", ["same losses", "device, GiB", "host, GiB"], cells)


def compare(model: Model, rates: DeviceRates, results: Results) -> None:
    """Print a row for each combination: its memory, then its parts and the time of a step."""
    plain: MemoryPrediction | None = None
    print(f"\n{model.name}, {model.subject.parameters / 1e9:.2f} B parameters, {ROWS} rows of {TOKENS} tokens\n")
    results.begin("memory", ["losses", "techniques", *SIZES])
    rows = []
    for kind, choice, optimizer in TABLE:
        training = settings(choice, optimizer, ROWS)
        subject = usual(model.subject) if kind == USUAL else model.subject
        found = predict(subject, training, TOKENS, rates)
        plain = plain or found
        results.add("memory", [kind, spoken(training), *compare_sizes(found.peak, found.host, plain)])
        at_peak = [f"{size / GIB:.2f}" for size in found.at_peak.values()]
        rows.append([kind, spoken(training), *at_peak, f"{found.seconds / plain.seconds:.2f}x"])
    parts = ["parameters", "gradients", "optimizer", "activations", "temporaries"]
    results.table("parts and time", ["losses", "techniques", *parts, "step time"], rows)


def compare_sizes(device: float, host: float, plain: MemoryPrediction) -> list[str]:
    """The cells of SIZES. device, host: bytes at the peak of each."""
    cells = [f"{device / GIB:.2f}", f"{plain.peak / device:.1f}x", f"{host / GIB:.2f}"]
    return [*cells, f"{plain.total / (device + host):.1f}x"]


def offload(model: Model, mesh: Mesh, more: tuple[Any, ...], rates: DeviceRates) -> MemoryPrediction:
    """Predict FSDP2 on one rank, with torch's cross_entropy or what `more` has."""
    training = settings((*MEANS, *more), "adamw", ROWS).model_copy(update={"mesh": mesh})
    return predict_rank(usual(model.subject), training, TOKENS, rates, 1)


def peers(model: Model, rates: DeviceRates, results: Results) -> None:
    """Print what FSDP2 and DeepSpeed take on one device, with gradient checkpointing and fused attention; and with
    micro-batches of one row and a fused linear cross-entropy, as Liger Kernel has it. Beside them Laconic's leanest."""
    subject = usual(model.subject)
    plain = predict(subject, settings(("sdpa",), BASELINE, ROWS), TOKENS, rates)
    rows: list[list[str]] = []
    variants: tuple[tuple[str, tuple[Any, ...]], ...] = (("", ()), (LEANER, LEANER_MEANS))
    for kind, mesh in (("exact", OFFLOAD), ("near", OFFLOAD_BF16)):
        for words, more in variants:
            found = offload(model, mesh, more, rates)
            name = f"FSDP2 with CPU offload, {(mesh.precision or 'fp32').upper()}{words}"
            rows.append([kind, name, *compare_sizes(found.peak, found.host, plain)])
    count = model.subject.parameters
    layers = model.subject.module.modules()
    largest = max(sum(each.numel() for each in part.parameters(recurse=False)) for part in layers)
    for name, device, host in (
        ("DeepSpeed ZeRO-Offload", 2 * count, 16 * count),
        ("DeepSpeed ZeRO-3 with parameters and optimizer on the host", 4 * largest, 18 * count),
    ):
        for words, more in variants:
            parts = predict(subject, settings((*MEANS, "bf16", *more), "adamw", ROWS), TOKENS, rates).phases
            beside = max(each["activations"] + each["temporaries"] for each in parts.values())
            rows.append(["near", f"{name}{words}", *compare_sizes(device + beside, host, plain)])
    for kind, dtype in (("exact", "fp32"), ("near", "bf16")):
        found = predict(model.subject, settings(ON_HOST[dtype], "adamw", ROWS), TOKENS, rates)
        sizes = compare_sizes(found.peak, found.host, plain)
        rows.append([kind, f"**Laconic**, `host-weights(dtype={dtype})`", *sizes])
    print()
    results.table("peers", ["losses", "tool", *SIZES], sorted(rows, key=itemgetter(0)))


def speed(models: tuple[Model, ...], rates: DeviceRates, results: Results) -> None:
    """Print how long predictions take, and how far those from a few layers are from those of all layers."""
    head = ["parameters", "combination", "GiB", "seconds", "every layer simulated: seconds", "apart"]
    print()
    results.begin("speed", head)
    choices: tuple[tuple[Any, ...], ...] = ((), ("sdpa", "chunked-cross-entropy", "bf16", "gradient-checkpointing"))
    for model in models:
        size = f"{model.subject.parameters / 1e9:.2f} B"
        for choice in choices:
            training = settings(choice, "adamw", ROWS)
            seconds, found = timed(model, training, rates, whole=False)
            longer, whole = timed(model, training, rates, whole=True)
            cells = [size, spoken(training), f"{found.peak / GIB:.2f}", f"{seconds:.1f}", f"{longer:.1f}"]
            results.add("speed", [*cells, f"{found.peak / whole.peak - 1:+.4%}"])
        begin = time.perf_counter()
        tried = list_combinations(model.subject, Training(batch_size=ROWS), torch.device("cpu"))
        for candidate in tried:
            predict(model.subject, candidate.training, TOKENS, rates)
        results.add("speed", [size, f"all {len(tried)} of a plan", "", f"{time.perf_counter() - begin:.1f}", "", ""])


def timed(model: Model, training: Training, rates: DeviceRates, *, whole: bool) -> tuple[float, MemoryPrediction]:
    """Wall-clock seconds of a prediction, and what it says."""
    begin = time.perf_counter()
    found = predict(model.subject, training, TOKENS, rates, whole=whole)
    return time.perf_counter() - begin, found


def fleet(model: Model, rates: DeviceRates, results: Results) -> None:
    """Print what a rank takes, by the number of ranks and how the shards are kept."""
    choice = ("sdpa", "gradient-checkpointing", "chunked-cross-entropy")
    print(
        f"\n{model.name}, {model.subject.parameters / 1e9:.2f} B parameters, one row of {TOKENS} tokens a rank, "
        f"{' + '.join(choice)}\n"
    )
    results.begin("fleet", ["ranks", "shards", "device, GiB", "host, GiB"])
    seconds = []
    for world in RANKS:
        for mesh in MESHES:
            training = settings(choice, "adamw", world).model_copy(update={"mesh": mesh})
            begin = time.perf_counter()
            found = predict_rank(model.subject, training, TOKENS, rates, world)
            kind = f"{mesh.precision or 'fp32'}{', on the host' if mesh.offload else ''}"
            sizes = [f"{found.peak / GIB:.2f}", f"{found.host / GIB:.2f}"]
            seconds.append([str(world), kind, f"{time.perf_counter() - begin:.0f}"])
            results.add("fleet", [str(world), kind, *sizes])
    results.table("fleet, time", ["ranks", "shards", "seconds to say so"], seconds)


def main() -> None:
    """Predict and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts of it")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where configs go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    parts = arguments.only
    rates = measure_rates(torch.device("cpu"))
    gpt = shared.gpt(arguments.cache, width=2048, layers=20, heads=16, words=50257, batch=ROWS, length=TOKENS)
    llama = shared.llama(arguments.cache, ROWS, TOKENS)
    if "digest" in parts:
        digest(gpt, rates, results)
    if "table" in parts:
        compare(gpt, rates, results)
    if "peers" in parts:
        peers(gpt, rates, results)
    if "speed" in parts:
        speed((gpt, llama), rates, results)
    if "fleet" in parts:
        fleet(llama, rates, results)


if __name__ == "__main__":
    main()
