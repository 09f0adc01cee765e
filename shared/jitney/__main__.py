"""`python -m jitney` is `jitney`."""

from jitney.cli import main

main()
