"""From a model to a float ONNX graph, with the proof that both compute the same."""
