"""The ways to tell how much a weight matters, one a file."""
