"""The image processors of transformers, one a module: what each makes of its settings."""
