"""The types that pass between quantization and export: the captured graph, the plan, scales and zero points."""
