"""How many replicas a load takes: a server's service times, and the queue in front of them, simulated."""
