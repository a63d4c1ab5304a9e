"""Pruning: stages that remove heads, FFN units, blocks, channels or single weights."""
