"""llama.cpp: the graph beside its file, which OpenVINO reads where llama.cpp is missing."""

from export.placements.openvino_cpu import FLOAT32
from export.placements.rules import PlacementRules
from laconic.runtimes.runtime import Compute

RULES: dict[Compute, PlacementRules] = {"int8-dynamic": FLOAT32}
