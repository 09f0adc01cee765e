"""Choices of one job share the blocks of their prompt: who has it already, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

from jitney_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Fork:
    """The first `num_tokens` of a sequence are in the blocks of its sibling."""

    sibling: Sequence
    num_tokens: int


class Siblings:
    """The sequences that are in the engine, by the group that they name. Sequences without a group cost nothing."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Raises ValueError if its siblings have another prompt or salt: there is nothing to share then."""
        group = sequence.request.group
        if not group:
            return
        siblings = self._groups.setdefault(group, [])
        if siblings and _prompt(siblings[0]) != _prompt(sequence):
            raise ValueError(f"sequence {sequence.id} has another prompt or salt than the rest of group {group!r}")
        siblings.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if group:
            self._groups[group].remove(sequence)
            if not self._groups[group]:
                del self._groups[group]

    def fork(self, sequence: Sequence) -> Fork | None:
        """What a waiting sequence can take over once its sibling is done with the prompt; None: nobody is at it.

        At least one known token is left over: somebody has to produce the logits after it.
        """
        group = self._groups.get(sequence.request.group)
        if group is None:
            return None
        running = [sibling for sibling in group if sibling.block_table]
        if not running:
            return None
        ahead = max(running, key=lambda sibling: sibling.num_computed_tokens)
        return Fork(ahead, min(sequence.num_prompt_tokens, sequence.num_tokens - 1))


def _prompt(sequence: Sequence) -> tuple[tuple[int, ...], str]:
    return sequence.request.prompt_ids, sequence.request.cache_salt
