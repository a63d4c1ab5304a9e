import json

from safetensors.torch import save_file


def save_for_hf(model, save_directory, model_config=None, safe_serialization=False, data_config=None):
    assert safe_serialization is True
    save_directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architecture": model.architecture,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        **(model_config or {}),
        "model_args": model.arguments,
        "pretrained_cfg": model.pretrained_cfg | (data_config or {}) | {"num_classes": model.num_classes},
    }
    save_file(model.state_dict(), save_directory / "model.safetensors")
    (save_directory / "config.json").write_text(json.dumps(config, indent=2))
