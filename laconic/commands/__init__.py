"""The commands of `laconic`, by subject. Each parses its options, calls one function, and prints the result."""
