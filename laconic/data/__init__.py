"""Samples: file formats, row parsing, and the dataset that tasks encode into batches."""
