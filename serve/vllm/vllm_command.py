"""The command line and the environment of `vllm serve`."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from laconic.errors import SourceError, UsageError

NAME = re.compile(r"[a-z][a-z0-9-]*(\.[\w.-]+)?")
"""An option of vLLM, without its dashes; what follows a dot is a key of its JSON."""
OURS = (
    "host", "port", "uds", "api-key", "model", "served-model-name", "root-path", "ssl-keyfile", "ssl-certfile",
    "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "allowed-origins", "allowed-methods", "allowed-headers",
    "allow-credentials", "disable-uvicorn-access-log", "headless", "grpc", "grpc-port", "api-server-count", "config",
)  # fmt: skip
"""Options that this server sets, or answers for in vLLM's place. A file of `config` could hold all of them."""
CODE = (
    "trust-remote-code", "middleware", "logits-processors", "tool-parser-plugin", "reasoning-parser-plugin",
    "io-processor-plugin", "worker-cls", "worker-extension-cls", "scheduler-cls",
)  # fmt: skip
"""Options that import code by name."""
HIDDEN = ("PYTHONPATH", "VLLM_API_KEY")
"""Variables that vLLM's environment does not get: our packages, and a key that this server would have to send."""
SECRET = "LACONIC_"  # noqa: S105 - of names
"""What our own variables begin with, keys among them."""
ALONE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Variables by which vLLM opens no connections: it has the checkpoint, and reports its use to nobody."""


def make_command(program: Path, folder: Path, name: str, options: Mapping[str, str], socket: Path) -> list[str]:
    """Make the command that serves a checkpoint at a unix socket. name: of the model. options: as of `check_options`.

    `true` and `false` are switches.
    """
    command = [str(program), "serve", str(folder), f"--uds={socket}", f"--served-model-name={name}"]
    command.append("--disable-uvicorn-access-log")  # this server has its own, and asks for the health every second
    for option, value in options.items():
        flag = name_flag(option)
        switch = {"true": f"--{flag}", "": f"--{flag}", "false": f"--no-{flag}"}
        command.append(switch.get(value.lower(), f"--{flag}={value}"))
    return command


def check_options(options: Mapping[str, str]) -> None:
    """Raise UsageError for options of vLLM that are not to be passed on. Their values are for vLLM to check."""
    for option in options:
        check_flag(name_flag(option))


def name_flag(option: str) -> str:
    """Return an option without dashes in front; vLLM takes underlines for dashes."""
    return option.removeprefix("--").replace("_", "-")


def check_flag(flag: str) -> None:
    """Raise UsageError for an option that is not to be passed on. A beginning of one stands for it, as vLLM takes
    it."""
    if not NAME.fullmatch(flag):
        raise UsageError(f"{flag[:60]!r} in vllm_options is no option of vLLM. Write them as max-model-len=4096")
    plain = flag.partition(".")[0].removeprefix("no-")
    if plain in OURS:
        raise UsageError(f"{flag!r} in vllm_options is this server's to say. Give its own settings, as --port")
    if any(code.startswith(plain) for code in CODE):
        raise UsageError(f"{flag!r} in vllm_options would run code that a checkpoint or a package brings. Leave it out")


def make_environment(program: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for vLLM, of those of this process: the tools of its environment come first."""
    kept = {name: value for name, value in environment.items() if name not in HIDDEN and not name.startswith(SECRET)}
    path = f"{program.parent}{os.pathsep}{environment.get('PATH', '')}"
    return kept | ALONE | {"PATH": path}


def find_program(program: str) -> Path:
    """Find the program `vllm`: a path, a folder of an environment, or a name in the PATH. Raises UsageError."""
    inside = Path(program) / "bin" / "vllm"
    path = shutil.which(inside if inside.is_file() else program)
    if path is None:
        raise UsageError(
            f"there is no program {program!r}. vLLM needs an environment of its own: python -m venv vllm; "
            f"vllm/bin/pip install vllm. Then give --vllm vllm"
        )
    return Path(path).absolute()


def check_folder(folder: Path) -> Path:
    """Return the absolute path of a checkpoint. Raises SourceError for a folder that holds none."""
    if (folder / "manifest.json").is_file():
        raise SourceError(
            f"{folder} is an artifact, and vLLM reads checkpoints. "
            f"Write one: laconic export {folder} --to compressed-tensors -o FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"{folder} is no checkpoint: it has no config.json. "
            f"Give a folder of transformers, compressed-tensors or GPTQ"
        )
    return folder.absolute()
