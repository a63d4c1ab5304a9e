"""`laconic finetune --accelerate`: the file that `accelerate config` writes, as keys of a recipe and ranks to start.

Each key of the file has an equal here, is decided here, or is refused: none is dropped without a word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from laconic.config import NamedSettings, explain, read_mapping
from laconic.errors import RecipeError, UsageError
from train.launchers.torchrun import LaunchSettings
from train.settings import TrainingRecipe, name_of

DECIDED = {
    "machine_rank", "rdzv_backend", "same_network", "main_training_function", "mpirun_config", "fsdp_version",
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_backward_prefetch",
    "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch", "fsdp_state_dict_type", "fsdp_use_orig_params",
    "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "zero3_init_flag", "zero3_save_16bit_model",
    "deepspeed_multinode_launcher", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation",
}  # fmt: skip
"""Keys on which no losses depend, and which Laconic decides itself: how ranks meet, layers are found and compiled,
weights are gathered, and snapshots are written."""
ENVIRONMENT = {
    "gpu_ids": "CUDA_VISIBLE_DEVICES chooses the GPUs",
    "use_cpu": "CUDA_VISIBLE_DEVICES= hides the GPUs",
    "enable_cpu_affinity": "numactl or the scheduler binds processes to cores",
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL checks collectives",
}
"""Keys whose equal is outside of a recipe, and what that is."""
SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config")
OWNERS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
"""Sections that Accelerate reads for one `distributed_type` alone."""
LAST = ("dynamo_mode", "zero_stage", "mixed_precision")
LAUNCHED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""The values of `distributed_type` that have an equal."""
UNSET: tuple[Any, ...] = (None, False, "", {}, [], "no", "NO", "none")
NUMBERS = (-1, 0, 1)
"""Values and numbers by which a key asks for nothing."""
SHARDED = {"FULL_SHARD", "1", "SHARD_GRAD_OP", "2", "TRUE", "FALSE"}
COPIED = {"NO_SHARD", "3"}
HYBRID = {"HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5"}
"""Sharding strategies of FSDP by what they are here: shards, replicas, and shards within a machine."""


@dataclass
class AccelerateConfig:
    """What a file of Accelerate asks for.

    launch: the ranks. mesh, techniques, settings: keys of a recipe. accumulation: micro-batches of a rank in each step.
    decided: keys that Laconic decides itself. notes: sentences about keys whose equal is elsewhere, or does more.
    """

    path: Path
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    mesh: dict[str, Any] = field(default_factory=dict)
    techniques: dict[str, NamedSettings] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    decided: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[str, int]:
        """Machines, and ranks on each of them."""
        return self.launch.nnodes, self.launch.nproc_per_node

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.launch.node_range[1] * self.launch.nproc_per_node

    def apply(self, recipe: TrainingRecipe) -> TrainingRecipe:
        """Return the recipe with what the file says. Raises RecipeError where both say something of one key."""
        changes = self.settings | ({"mesh": self.mesh} if self.mesh else {})
        techniques = dict(self.techniques)
        if self.accumulation > 1:
            rows = ceil(recipe.batch_size / (self.world * self.accumulation))
            techniques["gradient-accumulation"] = NamedSettings(name="gradient-accumulation", config={"rows": rows})
        twice = [name for name in changes if name in recipe.model_fields_set]
        twice += [name for name in techniques if name in map(name_of, recipe.techniques)]
        if twice:
            raise RecipeError(
                f"{', '.join(twice)}: both the recipe or the command line and {self.path} say something of it. Leave "
                f"one of them out"
            )
        # The fields that were set, and no others: some are expanded from one another.
        content = {name: getattr(recipe, name) for name in recipe.model_fields_set} | changes
        content["techniques"] = [*recipe.techniques, *techniques.values()]
        try:
            return TrainingRecipe.model_validate(content)
        except ValidationError as error:
            raise RecipeError(explain(error, str(self.path))) from None

    def settle_launch(self, settings: LaunchSettings) -> LaunchSettings:
        """Return the ranks to start. settings: of the command line, whose place to meet and restarts stand.

        Raises UsageError where it has other numbers of machines and ranks than the file.
        """
        ranks = (settings.nnodes, settings.nproc_per_node)
        if ranks not in ((LaunchSettings.nnodes, LaunchSettings.nproc_per_node), self.ranks):
            raise UsageError(
                f"--nnodes {ranks[0]} --nproc-per-node {ranks[1]}, and {self.path} has {self.ranks[0]} and "
                f"{self.ranks[1]}. Leave one of them out"
            )
        endpoint = settings.rdzv_endpoint or self.launch.rdzv_endpoint
        return replace(self.launch, rdzv_endpoint=endpoint, max_restarts=settings.max_restarts)

    def describe(self) -> list[str]:
        """Say what of the file is elsewhere, or was not taken from it."""
        if not self.decided:
            return self.notes
        return [*self.notes, f"{self.path}: Laconic decides itself about {', '.join(self.decided)}"]


def read_accelerate(path: Path) -> AccelerateConfig:
    """Read a file that `accelerate config` has written. Raises RecipeError for a key that has no equal, or is unknown.

    Values such as `false`, `no` and 1 ask for nothing.
    """
    content = read_mapping(path, "configuration of Accelerate", RecipeError)
    sections = {name: content.pop(name, None) or {} for name in SECTIONS}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise RecipeError(f"{path}: {name} is {section!r}; expected keys and values")
    config = AccelerateConfig(path)
    kind = str(content.pop("distributed_type", "")).rpartition(".")[2]
    if kind not in LAUNCHED:
        raise RecipeError(f"{path}: distributed_type is {kind!r}; those with an equal here are {', '.join(LAUNCHED)}")
    config.launch = read_launch(path, content, kind)
    if kind == "FSDP":
        config.mesh["shard"] = None
    unused = {name for name, owner in OWNERS.items() if owner != kind}
    settings = [item for name, values in sections.items() if name not in unused for item in values.items()]
    # The precision depends on the mesh, and the mode of a compiler on its backend.
    for key, value in sorted(
        [*settings, *content.items()], key=lambda item: LAST.index(item[0]) if item[0] in LAST else -1
    ):
        read_key(config, key, value)
    return config


def read_launch(path: Path, content: dict[str, Any], kind: str) -> LaunchSettings:
    """Take the keys of the ranks out of a file. Raises RecipeError for numbers that are none."""
    count, machines = content.pop("num_processes", 1), content.pop("num_machines", 1)
    host, port = content.pop("main_process_ip", None), content.pop("main_process_port", None)
    count = 1 if kind == "NO" else count
    if not (isinstance(count, int) and isinstance(machines, int) and machines >= 1 and count >= machines):
        raise RecipeError(
            f"{path}: num_processes is {count!r} and num_machines {machines!r}; expected a rank or more on each machine"
        )
    if count % machines:
        raise RecipeError(f"{path}: {count} processes are not the same number on each of {machines} machines")
    endpoint = f"{host}:{port or 29500}" if machines > 1 and host else None
    return LaunchSettings(str(machines), count // machines, endpoint)


def read_key(config: AccelerateConfig, key: str, value: Any) -> None:
    """Read one key of a file. Raises RecipeError where it has no equal."""
    if key in KEYS:
        try:
            KEYS[key](config, value)
        except ValueError as error:
            raise refuse(config, key, value, str(error)) from None
    elif is_unset(value):
        pass
    elif key in DECIDED:
        config.decided.append(key)
    elif key in ENVIRONMENT:
        if value != "all":
            config.notes.append(f"{config.path}: {key} has no equal in a recipe: {ENVIRONMENT[key]}")
    else:
        raise refuse(config, key, value, "there is nothing like it here. Leave it out")


def is_unset(value: Any) -> bool:
    """Return whether a key with this value asks for nothing."""
    return value in NUMBERS if type(value) is int else any(value is each or value == each for each in UNSET)


def refuse(config: AccelerateConfig, key: str, value: Any, reason: str) -> RecipeError:
    """Make the error for a key whose value has no equal."""
    return RecipeError(f"{config.path}: {key} is {value!r}: {reason}")


def read_precision(config: AccelerateConfig, value: Any) -> None:
    """Read `mixed_precision`: with shards of FSDP2, BF16 is that of the mesh."""
    is_technique = config.mesh.get("shard", 1) == 1 or (value == "bf16" and "zero" in config.mesh)
    if value in ("fp16", "bf16") and is_technique:
        config.settings["precision"] = "fp32" if value == "fp16" else "bf16"
        if value == "fp16":
            config.techniques["fp16"] = NamedSettings(name="fp16")
    elif value == "bf16":
        config.mesh["precision"] = "bf16"
        config.settings["precision"] = "fp32"
    elif is_unset(value):
        config.settings["precision"] = "fp32"
    else:
        raise ValueError("with this mesh there is fp32 and bf16")


def read_strategy(config: AccelerateConfig, value: Any) -> None:
    """Read the sharding strategy of FSDP, or whether weights are dropped after the forward pass."""
    name = str(value).upper().rpartition(".")[2]
    if name in COPIED:
        config.mesh.pop("shard", None)
    elif name in HYBRID:
        config.mesh |= {"shard": config.launch.nproc_per_node, "replicate": None}
    elif name not in SHARDED:
        raise ValueError("strategies are FULL_SHARD, HYBRID_SHARD and NO_SHARD")
    if name in {"SHARD_GRAD_OP", "2", "FALSE", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5"}:
        config.notes.append(
            f"{config.path}: weights are sharded between forward and backward pass, too: the same losses with less "
            f"memory, and more is sent"
        )


def read_zero_stage(config: AccelerateConfig, value: Any) -> None:
    """Read the stage of ZeRO, behind where shards are: DeepSpeed has them on the device here, and FSDP2 on the host."""
    if value not in (0, 1, 2, 3):
        raise ValueError("stages are 0 to 3")
    if not value:
        return
    config.mesh["shard"] = None
    if config.mesh.get("offload"):
        config.notes.append(
            f"{config.path}: ZeRO {value} with shards on the host becomes FSDP2, which shards the weights, too"
        )
    else:
        config.mesh["zero"] = value


def read_offload(config: AccelerateConfig, value: Any) -> None:
    """Read where shards and the optimizer's state are."""
    if value in (True, "cpu"):
        config.mesh["offload"] = True
    elif not is_unset(value):
        raise ValueError("shards can be in the host's memory (cpu)")


def read_checkpointing(config: AccelerateConfig, value: Any) -> None:
    """Read whether activations are computed again."""
    if value:
        config.techniques["gradient-checkpointing"] = NamedSettings(name="gradient-checkpointing")


def read_accumulation(config: AccelerateConfig, value: Any) -> None:
    """Read how many micro-batches a rank has in each step."""
    if not isinstance(value, int) or value < 1:
        raise ValueError("expected a number of micro-batches")
    config.accumulation = value


def read_clipping(config: AccelerateConfig, value: Any) -> None:
    """Read the norm to which gradients are clipped; 0 does not clip, and `none` leaves it to the recipe."""
    if value in (None, "none"):
        return
    if not isinstance(value, int | float):
        raise ValueError("expected a norm")
    config.settings["max_grad_norm"] = value or None


def read_compiler(config: AccelerateConfig, value: Any) -> None:
    """Read the compiler of torch.compile."""
    if str(value).upper() == "INDUCTOR":
        config.techniques["compile"] = NamedSettings(name="compile")
    elif not is_unset(value):
        raise ValueError("torch.compile has the backend INDUCTOR here")


def read_compiler_mode(config: AccelerateConfig, value: Any) -> None:
    """Read the mode of torch.compile, behind its backend."""
    if "compile" in config.techniques:
        config.techniques["compile"] = NamedSettings(name="compile", config={"mode": value})


def read_axis(axis: str) -> Callable[[AccelerateConfig, Any], None]:
    """Make the reader of the size of an axis of the mesh."""

    def read(config: AccelerateConfig, value: Any) -> None:
        if not is_unset(value):
            config.mesh[axis] = value

    return read


def read_gathering(config: AccelerateConfig, value: Any) -> None:
    """Read how ranks along `context` exchange keys and values."""
    if value != "allgather":
        raise ValueError("keys and values of all positions are gathered: allgather")


def read_environment(config: AccelerateConfig, value: Any) -> None:
    """Read where the ranks are."""
    if value != "LOCAL_MACHINE":
        raise ValueError("ranks are started on machines of your own: LOCAL_MACHINE")


PARALLELISM = "parallelism_config_"
KEYS: Mapping[str, Callable[[AccelerateConfig, Any], None]] = {
    "compute_environment": read_environment,
    "mixed_precision": read_precision,
    "gradient_accumulation_steps": read_accumulation,
    "gradient_clipping": read_clipping,
    "zero_stage": read_zero_stage,
    "offload_optimizer_device": read_offload,
    "offload_param_device": read_offload,
    "fsdp_sharding_strategy": read_strategy,
    "fsdp_reshard_after_forward": read_strategy,
    "fsdp_offload_params": read_offload,
    "fsdp_activation_checkpointing": read_checkpointing,
    "dynamo_backend": read_compiler,
    "dynamo_mode": read_compiler_mode,
    f"{PARALLELISM}dp_replicate_size": read_axis("replicate"),
    f"{PARALLELISM}dp_shard_size": read_axis("shard"),
    f"{PARALLELISM}cp_size": read_axis("context"),
    f"{PARALLELISM}cp_comm_strategy": read_gathering,
    f"{PARALLELISM}tp_size": read_axis("tensor"),
}
"""By key, what reads it. Each raises ValueError with the reason where a value has no equal."""
