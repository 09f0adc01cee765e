"""The load generator: named workloads against a running stack, measured from the client's side."""
