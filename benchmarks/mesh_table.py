"""Which mesh the planner proposes for a model, a number of devices and a link, as docs/past-one-device.md has them.

    python benchmarks/mesh_table.py [8B:8 70B:64]

Llamas are trained in BF16 with gradient checkpointing, ROWS rows of 4,096 tokens for each device, on devices of 80 GiB
whose speed is HALF of what the data sheet of an H100 says of BF16 products, and its 3.35 TB/s of memory: no device is
needed, and none was measured. No rank exists and no weight is read: a configuration is all there is of a model.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import Results, make_parser

from laconic.hardware import cores
from laconic.progress import Steps
from train.planner.device_rates import DeviceRates, RateCurve
from train.planner.mesh_plan import LINKS, Link, MeshPlan, choose_mesh, describe_mesh, plan_mesh
from train.planner.meta_model import open_meta_model
from train.settings import Training

HALF, PRODUCTS, MEMORY_RATE, LAUNCH = 0.5, 989.4e12, 3.35e12, 5e-6
"""Of a product: its share of the peak, the peak in FLOP/s; bytes a second of memory; seconds of the shortest kernel."""
HOST_RATE = 50e9
"""Bytes a second between host and device, over PCIe 5."""
MEMORY, LENGTH, ROWS = 80 * 2**30, 4096, 4
MODELS: Mapping[str, Mapping[str, int]] = {
    "1B": {"layers": 16, "width": 2048, "units": 8192, "heads": 32},
    "8B": {"layers": 32, "width": 4096, "units": 14336, "heads": 32},
    "70B": {"layers": 80, "width": 8192, "units": 28672, "heads": 64},
}
"""The shapes of Llama 3.2 1B, 3.1 8B and 3.1 70B, each with 8 heads of keys and values and a vocabulary of 128,256."""
CELLS = ("1B:8", "8B:8", "8B:64", "70B:64", "70B:256")
"""Models and numbers of devices."""
TECHNIQUES = ("gradient-checkpointing", "bf16")


def make_rates() -> DeviceRates:
    """Make the rates of a device from its data sheet; the optimizer passes over memory as often as here."""
    product = make_curve(HALF * PRODUCTS)
    return DeviceRates(
        name="H100, by its data sheet",
        kind="cpu",
        products={"float32": make_curve(HALF * PRODUCTS / 2), "bfloat16": product, "float16": product},
        passes=make_curve(MEMORY_RATE),
        copies=make_curve(HOST_RATE),
    )


def make_curve(rate: float) -> RateCurve:
    """Make the seconds of work at a rate, none shorter than a launch."""
    return RateCurve(amounts=(rate * LAUNCH, rate), seconds=(LAUNCH, 1.0))


def write_config(name: str, folder: Path) -> Path:
    """Write the configuration of a Llama."""
    shape = MODELS[name]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape["layers"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["units"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 2 * LENGTH,
        "tie_word_embeddings": name == "1B",
    }
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def plan(source: Path, devices: int) -> MeshPlan:
    """Plan all meshes of a model on so many devices."""
    return plan_mesh(
        open_meta_model(source),
        Training.model_validate({"batch_size": ROWS * devices, "techniques": TECHNIQUES}),
        length=LENGTH,
        devices=devices,
        memory=MEMORY,
        link=Link("nvlink", LINKS["nvlink"]),
        device=torch.device("cpu"),
        apart=True,
        steps=Steps(quiet=True),
        rates=make_rates(),
        workers=cores(),
    )


def describe_choice(planned: MeshPlan, rate: float) -> str:
    """Describe the mesh that is chosen for a link, with the seconds of its step and its memory."""
    rows = [replace(row, seconds=row.prediction.count_seconds(rate)) for row in planned.rows]
    chosen = choose_mesh(sorted(rows, key=lambda row: (row.seconds, row.need)), planned.memory)
    if chosen is None:
        least = min(rows, key=lambda row: row.need)
        return f"none fits; the least is {least.need / 2**30:.0f} GiB"
    return f"{describe_mesh(chosen)}: {chosen.seconds:.3g} s, {chosen.need / 2**30:.0f} GiB"


def main() -> None:
    """Print the table, row by row, and how long planning took."""
    parser = make_parser(__doc__)
    parser.add_argument("cells", nargs="*", default=list(CELLS), help="models with numbers of devices, as 8B:64")
    options = parser.parse_args()
    results = Results(publish=options.publish)
    begin = time.perf_counter()
    results.begin("meshes", ["model", "devices", *(f"`{link}`" for link in LINKS)])
    with tempfile.TemporaryDirectory() as folder:
        for cell in options.cells:
            name, devices = cell.split(":")
            planned = plan(write_config(name, Path(folder)), int(devices))
            results.add("meshes", [name, devices, *(describe_choice(planned, rate) for rate in LINKS.values())])
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
