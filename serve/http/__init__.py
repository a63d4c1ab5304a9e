"""The routes over HTTP: KServe V2, tasks, OpenAI's embeddings, and the control plane with its page."""
