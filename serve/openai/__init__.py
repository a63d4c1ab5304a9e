"""OpenAI's API apart from HTTP: what its requests for text mean, and the shape of its answers and errors."""
