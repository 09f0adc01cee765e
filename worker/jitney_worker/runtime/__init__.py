"""The runtime awaits: Redis, the clock and signals. It sees the engine only through its protocol."""
