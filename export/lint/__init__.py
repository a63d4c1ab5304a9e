"""Linters of ONNX graphs: why an engine that is not on this machine would refuse a graph, or leave INT8 or FP8."""
