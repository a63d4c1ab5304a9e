"""Models that write: their engine in a process of its own, admission to its cache, and from tokens to text."""
