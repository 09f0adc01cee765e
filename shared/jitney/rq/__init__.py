"""Jobs of RQ that are generated here: `queue.enqueue("jitney.rq.generate", "…", max_tokens=64)` in any RQ app.

What this package exports are the functions that RQ finds by name; see docs/RQ.md. `import rq` in here is RQ itself.
"""

from jitney.rq.plain import cancel, generate, run_batch

__all__ = ["cancel", "generate", "run_batch"]
