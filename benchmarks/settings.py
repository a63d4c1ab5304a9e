"""What each setting of `quantize.static` does to MiniLM's fidelity and speed, no layer being given bits back.

    python benchmarks/settings.py

Each row is a whole run of `laconic compress` for OpenVINO, judged on texts that nothing has seen.
"""

from pathlib import Path

from inputs import model_folder, texts
from results import Results, make_parser

from compress.pipeline import compress
from laconic.cache import Cache
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe

SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"smoothquant": False},
    {"method": "percentile", "smoothquant": False},
    {"method": "mse", "smoothquant": False},
    {"method": "entropy", "smoothquant": False},
    {"method": "mse"},
    {"samples": 32},
    {"samples": 1024},
)


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    folder = arguments.cache
    folder.mkdir(parents=True, exist_ok=True)
    source = model_folder(folder)
    data, _ = texts(folder)
    results.begin("settings", ["`quantize.static`", "arithmetic", "mean", "worst", "batch 8"])
    for settings in SETTINGS:
        recipe = Recipe.default(
            str(source),
            data=str(data),
            stages=[{"quantize.static": {**settings, "mixed_precision": False}}],
            runtimes=["openvino"],
        )
        made = compress(recipe, folder / "settings.laconic", steps=Steps(quiet=True), cache=Cache(folder / "cache"))
        manifest, measured = made.artifact.manifest, made.artifact.measured
        assert manifest.verdict is not None
        found = manifest.verdict.drift[0].figures
        speed = next(time.speedup for time in measured.timings if time.engine != "original" and time.batch == 8)
        shown = ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
        cells = [f"`{shown}`" if shown else "as it is by default", manifest.compute]
        cells += [f"{found['fidelity']:.5f}", f"{found['fidelity_worst']:.5f}", f"{speed:.2f} x"]
        results.add("settings", cells)


if __name__ == "__main__":
    main()
