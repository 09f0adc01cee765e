"""Static against continuous batching on the real scheduler, with a virtual clock and no model."""
