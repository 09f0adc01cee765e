"""An RQ application whose jobs jitney generates."""
