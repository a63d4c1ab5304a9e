"""The server's settings: from options, the environment and a file."""
