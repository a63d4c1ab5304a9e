"""The artifact: a folder with a model, the proof that its outputs match the original's, and its history."""
