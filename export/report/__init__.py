"""The HTML report of an artifact or a checkpoint."""
