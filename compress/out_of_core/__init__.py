"""Language models that do not fit in memory, quantized and compared with the original a layer at a time."""
