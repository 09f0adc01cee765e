"""jitney: durable, Redis-native LLM generation by continuous batching."""
