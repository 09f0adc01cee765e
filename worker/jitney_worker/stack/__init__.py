"""The local stack: embedded server, API and workers as one tree of child programs."""
