"""Graph passes over ONNX: normalization, constant folding, attention, Q/DQ rewriting."""
