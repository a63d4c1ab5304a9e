"""What stands in for the program `vllm` in tests, where vLLM is not installed: its flags, routes and processes.

It reads the command line by the flags of the real parser, writes the words of a prompt over and over, in OpenAI's
shape, and has an "engine" in a process of its own that outlives it, as vLLM's does. It knows nothing of models.
"""

import argparse
import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

FLAGS = json.loads(Path(__file__).with_name("vllm_flags.json").read_text())
LONGEST = 8192
"""Tokens of a context, beyond which it refuses to start as vLLM does."""
STEP = 0.02
"""Seconds for a token."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, as far as names go."""
    parser = argparse.ArgumentParser("vllm serve", add_help=False)
    parser.add_argument("model_tag")
    for name in FLAGS["switches"]:
        parser.add_argument(f"--{name}", action="store_true")
    for name in FLAGS["values"]:
        parser.add_argument(f"--{name}")
    return parser


class Handler(BaseHTTPRequestHandler):
    """The routes. written: tokens, of all requests. aborted: requests whose clients hung up."""

    protocol_version = "HTTP/1.1"
    model, tokens, aborted = "", 0, 0

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def reply(self, status: int, content: object, kind: str = "application/json") -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, "")
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": self.model, "root": "/secret", "max_model_len": LONGEST}]})
        elif self.path == "/metrics":
            counts = {"vllm:generation_tokens_total": Handler.tokens, "vllm:aborted": Handler.aborted, "python_info": 1}
            self.reply(200, "".join(f"# TYPE {name} counter\n{name} {count}\n" for name, count in counts.items()))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if request.get("model") != self.model:
            self.reply(404, {"error": {"message": f"The model `{request.get('model')}` does not exist."}})
            return
        words = [request["prompt"], self.headers["x-request-id"] or "", self.headers["authorization"] or "no key"]
        if not request.get("stream"):
            time.sleep(STEP * request["max_tokens"])
            self.reply(200, {"choices": [{"text": " ".join(words)}]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for number in range(request["max_tokens"]):
                self.send({"choices": [{"index": 0, "text": words[number % len(words)]}]})
                Handler.tokens += 1
                time.sleep(STEP)
            self.send("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            Handler.aborted += 1
            self.close_connection = True

    def send(self, content: object) -> None:
        """Send an event, in two pieces."""
        event = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
        for piece in (event[:7], event[7:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[object, object]:
        """A connection, with an address as HTTP's handler reads it."""
        return super().get_request()[0], ("unix", 0)


def main() -> None:
    """Serve as `vllm serve FOLDER` does, until SIGTERM."""
    assert sys.argv[1] == "serve"
    options = make_parser().parse_args(sys.argv[2:])
    if int(options.max_model_len or 0) > LONGEST:
        print("(EngineCore pid=1) ERROR [core.py:1] ValueError: max_model_len is greater than 8192", file=sys.stderr)
        print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
        sys.exit(1)
    assert not any(name.startswith(("LACONIC_", "PYTHONPATH")) for name in os.environ)
    engine = subprocess.Popen(["sleep", "600"])
    print(f"engine {engine.pid}, server {os.getpid()}", flush=True)
    Handler.model = options.served_model_name
    signal.signal(signal.SIGTERM, lambda *_: (engine.kill(), os._exit(0)))
    with Server(options.uds, Handler) as server:
        server.serve_forever(0.05)


if __name__ == "__main__":
    main()
