"""Snapshots of a training run to resume from: asynchronous, incremental, atomic."""
