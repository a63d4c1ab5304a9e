"""Load on a running server: clients in a closed loop or arrivals at a rate, and what came of it."""
