"""Optimizers: frozen settings beside the code that they build. One optimizer a file."""
