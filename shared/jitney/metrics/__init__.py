"""What is counted, how it travels, and how Prometheus is told: for worker and API alike."""
