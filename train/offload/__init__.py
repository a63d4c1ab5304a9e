"""Tensors off the device: host memory, activation stores, streamed weights; memory accounting and chunked loops."""
