"""Tensor parallelism of all causal language models that have a plan in transformers, and context parallelism of all, as
docs/past-one-device.md counts them.

    python benchmarks/tensor_families.py [--axis context] [NAME ...]

A small model of each type takes three steps in one process, and three by two ranks with a plan from its config, or with
a part of the positions each. A line for each type: the largest difference of the loss, or why it did not run.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from mesh_losses import CPU, find_benchmarks, make_batch
from results import Results, make_parser
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from laconic.models.language_model import LanguageModel
from train.objectives.next_token import NextToken
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks, open_ranks
from train.parallel.tensor_plan import read_config_plan
from train.settings import Training
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

STEPS, CLOSE, SECONDS = 3, 1e-5, 120
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_group", "num_expert_group", "first_k_dense_replace", "n_shared_experts"), 1
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(("residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
}
"""Sizes of a small model, by their names in one config or another."""

UNSET = (
    *("pad_token_id", "num_experts_per_tok", "n_routed_experts", "n_group", "topk_group", "n_shared_experts"),
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "head_dim",
)
"""Those of them that are set even where the default is none."""


def list_types(axis: str) -> list[str]:
    """List the types of causal language models, for tensor parallelism those whose config has a plan."""
    names = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.AutoConfig.for_model(name).get_text_config()
        except Exception:  # noqa: BLE001 - one that needs a package or a setting, whatever it raises
            continue
        if axis == "context" or getattr(config, "base_model_tp_plan", None):
            names.append(name)
    return names


def make_model(name: str) -> Any:
    """Build a small model of a type."""
    known = transformers.AutoConfig.for_model(name)
    settings = known.get_text_config().to_dict()
    changes = {
        key: value for key, value in SMALL.items() if key in settings and (settings[key] is not None or key in UNSET)
    }
    if "rope_parameters" in settings and not (settings["rope_parameters"] or {}).get("rope_theta", 1.0):
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = type(known.get_text_config())(**changes)
    if "num_kv_shared_layers" in settings:
        config.num_kv_shared_layers = 0
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def train_model(model: Any, ranks: Ranks, mesh: dict[str, Any]) -> list[float]:
    """Return the losses of some steps."""
    optimizer = {"adamw": {"lr": 1e-3, "implementation": "foreach"}}
    training = Training.model_validate({"mesh": mesh, "batch_size": 12, "optimizer": optimizer})
    parts = make_step_parts(
        LanguageModel(model),
        NextToken(None),  # type: ignore[arg-type]
        training.components(),
        CPU,
        tensor=ranks.select_axes("tensor"),
        context=ranks.context,
    )
    distribute_step(parts, training, ranks)
    state = parts.assemble()
    losses = [train_step(state, make_batch(step, 0, 1), max_grad_norm=0.5) for step in range(STEPS)]
    return [float(loss) for loss in losses if loss is not None]


def compare(axis: str, name: str, rank: int, port: int, folder: Path) -> None:
    """Train a model in this process and with another rank, and write down the difference."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = folder / f"{name}-{rank}.json"
    try:
        model = make_model(name)
        assert axis == "context" or read_config_plan(model), "no plan for its layers"
        alone = train_model(model, Ranks(), {})
        with open_ranks(CPU, Mesh(timeout=SECONDS)):
            ranks = Ranks.of(rank, 2, CPU, Mesh.model_validate({axis: 2}))
            both = train_model(make_model(name), ranks, {axis: 2})
        difference = max(abs(one - other) for one, other in zip(alone, both, strict=True))
        path.write_text(json.dumps({"difference": difference}))
    except BaseException as error:  # noqa: BLE001 - whatever a model raises is its answer
        path.write_text(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"}))
        os._exit(1)


def run_type(axis: str, name: str, folder: Path) -> dict[str, Any]:
    """Compare one type by two processes, which are forked from one that has imported everything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensor_families"])
    processes = [context.Process(target=compare, args=(axis, name, rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    path = folder / f"{name}-0.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {"error": "did not end"}


def main() -> None:
    """Print a row for each type, and how many are equal."""
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", help="types; default: all, for tensor those that have a plan")
    parser.add_argument("--axis", default="tensor", choices=("tensor", "context"))
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    types = arguments.names or list_types(arguments.axis)
    equal = 0
    results.begin("types", ["type", "losses", "largest difference"])
    with tempfile.TemporaryDirectory() as folder:
        for name in types:
            figures = run_type(arguments.axis, name, Path(folder))
            is_equal = figures.get("difference", 1.0) <= CLOSE
            equal += is_equal
            answer = figures.get("error") or f"{figures['difference']:.1e}"
            results.add("types", [name, "equal" if is_equal else "differs", answer])
    print(f"{equal} of {len(types)} equal to one process within {CLOSE:g}")


if __name__ == "__main__":
    find_benchmarks()
    main()
