"""What requests of every protocol share: the memory that they hold, work in threads, what clients learn of errors."""
