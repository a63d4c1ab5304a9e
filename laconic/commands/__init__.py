"""The commands of `laconic`, by what they work on. Each parses, calls one function, and shows what came of it."""
