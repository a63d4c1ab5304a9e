"""`laconic serve --on vllm`: a checkpoint that vLLM answers with, in a process of its own behind this server."""
