"""Files that `accelerate config` writes become keys of a recipe and ranks to start, and nothing is dropped unsaid."""

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from laconic.errors import RecipeError, UsageError
from train.launchers.accelerate_config import read_accelerate
from train.launchers.torchrun import LaunchSettings
from train.settings import TrainingRecipe

BASE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1,
    "num_processes": 4, "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
    "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
FSDP = {
    "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": True, "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_version": 2,
}  # fmt: skip
ZERO = {"zero_stage": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "zero3_init_flag": True}
PARALLEL = "parallelism_config_"


@pytest.fixture
def convert(tmp_path):
    """Have Accelerate write a file, and read it into a recipe of 24 rows a batch."""

    def run(kind, *, recipe=None, **changes):
        path = tmp_path / "accelerate.yaml"
        ClusterConfig(**BASE | {"distributed_type": kind} | changes).to_yaml_file(path)
        config = read_accelerate(path)
        content = {"source": "m", "data": "d.jsonl", "batch_size": 24} | (recipe or {})
        return config, config.apply(TrainingRecipe.model_validate(content))

    return run


def summarize(recipe):
    """What a recipe has beside the source and the data."""
    content = yaml.safe_load(recipe.to_yaml())
    return {name: content[name] for name in ("mesh", "techniques", "precision", "max_grad_norm") if content.get(name)}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("NO", {"num_processes": 1}, {"precision": "fp32"}),
        ("MULTI_GPU", {"mixed_precision": "bf16"}, {"precision": "bf16", "techniques": ["bf16"]}),
        ("MULTI_GPU", {"mixed_precision": "fp16"}, {"precision": "fp32", "techniques": ["fp16"]}),
        (
            "FSDP",
            {"fsdp_config": FSDP, "mixed_precision": "bf16"},
            {
                "mesh": {"shard": None, "precision": "bf16", "offload": True},
                "techniques": ["gradient-checkpointing"],
                "precision": "fp32",
            },
        ),
        (
            "FSDP",
            {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "num_machines": 2},
            {"mesh": {"shard": 2}, "precision": "fp32"},
        ),
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"precision": "fp32"}),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 0, "gradient_clipping": None}}, {"precision": "fp32"}),
        (
            "DEEPSPEED",
            {"deepspeed_config": {"zero_stage": 2}, "mixed_precision": "bf16"},
            {"mesh": {"shard": None, "zero": 2}, "precision": "bf16", "techniques": ["bf16"]},
        ),
        ("MULTI_CPU", {"parallelism_config": {f"{PARALLEL}tp_size": None}}, {"precision": "fp32"}),
        (
            "DEEPSPEED",
            {"deepspeed_config": ZERO | {"offload_optimizer_device": "cpu", "offload_param_device": "none"}},
            {
                "mesh": {"shard": None, "offload": True},
                "techniques": [{"gradient-accumulation": {"rows": 3}}],
                "precision": "fp32",
                "max_grad_norm": 0.5,
            },
        ),
        (
            "FSDP",
            {"parallelism_config": {f"{PARALLEL}cp_size": 2, f"{PARALLEL}cp_comm_strategy": "allgather"}},
            {"mesh": {"shard": None, "context": 2}, "precision": "fp32"},
        ),
        (
            "MULTI_GPU",
            {
                "parallelism_config": {f"{PARALLEL}dp_shard_size": 2, f"{PARALLEL}tp_size": 2, f"{PARALLEL}cp_size": 1},
                "dynamo_config": {"dynamo_mode": "reduce-overhead", "dynamo_backend": "INDUCTOR"},
            },
            {
                "mesh": {"shard": 2, "tensor": 2},
                "techniques": [{"compile": {"mode": "reduce-overhead"}}],
                "precision": "fp32",
            },
        ),
    ],
)
def test_settings_with_an_equal_become_keys_of_a_recipe(convert, kind, changes, expected):
    assert summarize(convert(kind, **changes)[1]) == expected


def test_what_is_decided_or_has_its_equal_elsewhere_is_said(convert):
    config, _ = convert("FSDP", fsdp_config=FSDP, use_cpu=True, gpu_ids="0,1")
    *notes, decided = config.describe()
    assert any("use_cpu has no equal in a recipe: CUDA_VISIBLE_DEVICES= hides the GPUs" in note for note in notes)
    assert any("gpu_ids has no equal" in note for note in notes)
    for name in ("fsdp_auto_wrap_policy", "fsdp_state_dict_type", "fsdp_version", "rdzv_backend"):
        assert name in decided
    config, _ = convert("DEEPSPEED", deepspeed_config={"zero_stage": 2, "offload_optimizer_device": "cpu"})
    assert "ZeRO 2 with shards on the host becomes FSDP2" in config.describe()[0]
    config, _ = convert("FSDP", fsdp_config={"fsdp_reshard_after_forward": False})
    assert "between forward and backward pass, too" in config.describe()[0]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("MEGATRON_LM", {}, "distributed_type is 'MEGATRON_LM'; those with an equal here are NO, MULTI_CPU, MULTI_GPU"),
        ("MULTI_GPU", {"mixed_precision": "fp8"}, "mixed_precision is 'fp8'"),
        ("FSDP", {"mixed_precision": "fp16"}, "mixed_precision is 'fp16': with this mesh there is fp32 and bf16"),
        ("MULTI_GPU", {"fp8_config": {"backend": "TE"}}, "fp8_config is .*there is nothing like it here"),
        (
            "MULTI_GPU",
            {"parallelism_config": {f"{PARALLEL}cp_comm_strategy": "alltoall"}},
            "of all positions are gathered",
        ),
        ("MULTI_GPU", {"parallelism_config": {f"{PARALLEL}sp_size": 2}}, f"{PARALLEL}sp_size is 2: there is nothing"),
        ("MULTI_GPU", {"dynamo_config": {"dynamo_backend": "AOT_EAGER"}}, "dynamo_backend is 'AOT_EAGER'"),
        ("DEEPSPEED", {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "deepspeed_config_file is 'ds.json'"),
        (
            "DEEPSPEED",
            {"deepspeed_config": {"offload_param_device": "nvme"}},
            "offload_param_device is 'nvme': shards can be in the host's memory",
        ),
        ("DEEPSPEED", {"deepspeed_config": {"gradient_accumulation_steps": "auto"}}, "expected a number of micro"),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 4}}, "stages are 0 to 3"),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": "auto"}}, "stages are 0 to 3"),
        ("DEEPSPEED", {"deepspeed_config": {"gradient_clipping": "auto"}}, "gradient_clipping is 'auto': expected a"),
        ("FSDP", {"fsdp_config": "yes"}, "fsdp_config is 'yes'; expected keys and values"),
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "strategies are FULL_SHARD"),
        ("FSDP", {"fsdp_config": {"fsdp_ignored_modules": "head"}}, "fsdp_ignored_modules is 'head'"),
        ("MULTI_GPU", {"num_machines": 3}, "4 processes are not the same number on each of 3 machines"),
        ("MULTI_GPU", {"num_processes": -1}, "expected a rank or more on each machine"),
        ("FSDP", {"recipe": {"mesh": {"tensor": 2}}}, "mesh: both the recipe or the command line and .* say something"),
        (
            "FSDP",
            {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": True}},
            "offload is for shards, and this mesh has none",
        ),
    ],
)
def test_what_has_no_equal_is_refused_by_its_key(convert, kind, changes, message):
    with pytest.raises(RecipeError, match=message):
        convert(kind, **changes)


def test_ranks_are_those_of_the_file_and_the_command_line_may_say_where_they_meet(convert):
    config, _ = convert("MULTI_CPU", num_machines=2, main_process_ip="10.0.0.1", main_process_port=1234)
    assert config.settle_launch(LaunchSettings()) == LaunchSettings("2", 2, "10.0.0.1:1234")
    given = LaunchSettings("2", 2, "host:1", max_restarts=3)
    assert config.settle_launch(given) == given
    with pytest.raises(UsageError, match=r"--nnodes 1 --nproc-per-node 4, and .* has 2 and 2"):
        config.settle_launch(LaunchSettings(nproc_per_node=4))


def test_a_command_takes_the_file_and_prints_what_it_becomes(laconic, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(BASE | {"distributed_type": "FSDP", "fsdp_config": FSDP}))
    command = ("finetune", "m", "--data", "d.jsonl", "--accelerate", path, "--show-recipe")
    code, out, err = laconic(*command)
    assert code == 0
    assert yaml.safe_load(out)["mesh"] == {"shard": None, "offload": True}
    assert "Laconic decides itself about" in err
    path.write_text("distributed_type: [")
    code, _, err = laconic(*command)
    assert (code, "is not valid YAML" in err) == (2, True)
    code, _, err = laconic("finetune", "m", "--data", "d.jsonl", "--accelerate", tmp_path / "none.yaml")
    assert (code, "there is no configuration of Accelerate" in err) == (2, True)
