"""Tensors that live off the device: host memory, disk stores, streamed weights, and the accounting of bytes."""
