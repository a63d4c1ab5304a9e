"""Quantization: post-training (static, dynamic, weight-only, GPTQ) and quantization-aware training."""
