"""How other libraries store quantized weights in a folder of transformers, one a module."""
