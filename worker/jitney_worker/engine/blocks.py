"""The KV cache's blocks: who uses which, which are free, and in which order free ones are taken.

A block is in one of three places: in use (reference count above 0), free and blank, or free with content
that a later prompt may hit. Source of the scheme: PagedAttention, Kwon et al. 2023.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jitney_worker.engine.prefix_cache import HashBlock, PrefixCache, sha256_digest
from jitney_worker.engine.protocol import BlockCopy
from jitney_worker.engine.sequence import Sequence, SequenceId
from jitney_worker.engine.siblings import Fork


class BlockManager:
    """Hands blocks to sequences and takes them back. Writes a sequence's block table and its cached counts."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock = sha256_digest,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._cache = PrefixCache(num_blocks, block_size, hash_block) if enable_prefix_caching else None
        self._ref_counts = [0] * num_blocks
        self.num_shared = 0
        """Blocks that more than one sequence, or copy, uses."""
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, least recently used first."""
        self._copies: dict[SequenceId, BlockCopy] = {}
        """Copies that forks wait for. Each holds its source, which nobody else may get until it is made."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, whether they still hold something or not."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of the free ones, those with content that a prompt may hit."""
        return len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, *, reserve: int, fork: Fork | None = None, reuses_cached: bool = True) -> bool:
        """Give a sequence blocks for all its known tokens, those it shares first; False if there are too few.

        reserve: free blocks that must be left over. fork: what a sibling has computed of it; taken where it is more
        than what the cache has. reuses_cached: False for a sequence of which every token must be computed.
        Sets `block_table` and `num_computed_tokens`. All known tokens at once: a prompt computed in chunks then
        never runs out of blocks half-way.
        """
        shared, fork = self._shared(sequence, fork, reuses_cached)
        if self._num_taken(sequence, shared) + reserve > self.num_free:
            return False
        for block in shared:
            self._use_again(block)
        if self._cache:
            sequence.block_serials = fork.sibling.block_serials[: len(shared)] if fork else self._cache.serials(shared)
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(shared)
        sequence.block_table = shared + [self._take() for _ in range(num_new)]
        sequence.num_computed_tokens = len(shared) * self.block_size
        if fork is not None:
            self._copy_rest(sequence, fork)
        return True

    def num_missing(
        self, sequence: Sequence, *, reserve: int, fork: Fork | None = None, reuses_cached: bool = True
    ) -> int:
        """How many blocks too few are free for `admit`; 0 or less: there are enough."""
        shared, _ = self._shared(sequence, fork, reuses_cached)
        return self._num_taken(sequence, shared) + reserve - self.num_free

    def _shared(self, sequence: Sequence, fork: Fork | None, reuses_cached: bool) -> tuple[list[int], Fork | None]:
        """Blocks that hold its first tokens already, and the fork if they are a sibling's."""
        cached = self._cache.match(sequence) if self._cache and reuses_cached else []
        if fork is not None and fork.num_tokens > len(cached) * self.block_size:
            return fork.sibling.block_table[: fork.num_tokens // self.block_size], fork
        return cached, None

    def _num_taken(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that its admission would use up: new ones, and shared ones that nobody uses now."""
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(shared)
        return num_new + sum(self._ref_counts[block] == 0 for block in shared)

    def _copy_rest(self, sequence: Sequence, fork: Fork) -> None:
        """Let the sequence go on in a copy of the block in which the shared tokens end: each writes into its own.

        A sibling may itself still wait for its copy of that block. It may leave before it is made, so it is not
        copied from.
        """
        index, num_tokens = divmod(fork.num_tokens, self.block_size)
        if num_tokens:
            source, unmade = fork.sibling.block_table[index], self._copies.get(fork.sibling.id)
            if unmade is not None and unmade.target == source:
                source = unmade.source
            self._use_again(source)
            self._copies[sequence.id] = BlockCopy(source, sequence.block_table[index], num_tokens)
        sequence.num_computed_tokens = fork.num_tokens

    @property
    def copies(self) -> list[BlockCopy]:
        """Copies to be made before the next step is computed."""
        return list(self._copies.values())

    def copied(self) -> None:
        """The copies have been made."""
        for copy in self._copies.values():
            self._give_back(copy.source)
        self._copies.clear()

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the table until it holds `num_tokens`; False, and nothing changed, if there are too few blocks."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > self.num_free:
            return False
        sequence.block_table.extend(self._take() for _ in range(num_new))
        return True

    def enter(self, sequence: Sequence) -> None:
        """Let later prompts find the sequence's full, computed blocks. Call after each step it was computed in."""
        if self._cache is None or sequence.num_computed_tokens // self.block_size <= len(sequence.block_serials):
            return
        for block in self._cache.enter(sequence):
            self._blanked(block)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back; it has computed nothing any more.

        Last block first: the head of a prompt is the likeliest to be asked for again, so it is evicted last.
        """
        for block in reversed(sequence.block_table):
            self._give_back(block)
        copy = self._copies.pop(sequence.id, None) if self._copies else None
        if copy is not None:
            self._give_back(copy.source)
        sequence.block_table = []
        sequence.block_serials = []
        sequence.num_computed_tokens = 0

    def forget(self, sequence: Sequence) -> None:
        """Let nobody find the blocks of a sequence that went wrong: what poisoned it may be in them."""
        if self._cache is None:
            return
        for block in sequence.block_table:
            self._cache.forget(block)
            self._blanked(block)

    def _take(self) -> int:
        """A free block, blank ones first; otherwise evict the content that was used longest ago."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            assert self._cache is not None
            self._cache.forget(block)
        self._ref_counts[block] = 1
        return block

    def _use_again(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1
        self.num_shared += self._ref_counts[block] == 2

    def _give_back(self, block: int) -> None:
        """One user less; the last one leaves it free."""
        self._ref_counts[block] -= 1
        self.num_shared -= self._ref_counts[block] == 1
        if self._ref_counts[block]:
            return
        if self._cache is not None and self._cache.holds(block):
            self._cached[block] = None
        else:
            self._blank.append(block)

    def _blanked(self, block: int) -> None:
        """The content of a block is gone: if it is free, it is now free and blank."""
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def sample(self, num_cells: int) -> str:
        """What evenly spread blocks are now, one letter each: `f`ree, `c`ached, `u`sed, `s`hared; of few, all.

        Costs time in proportion to the cells, not to the cache.
        """
        stride = max(1, -(-self.num_blocks // num_cells))
        return "".join(
            ("s" if count > 1 else "u") if count else "c" if block in self._cached else "f"
            for block, count in zip(range(0, self.num_blocks, stride), self._ref_counts[::stride], strict=True)
        )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every block is in exactly one place and is referenced by exactly those who count.

        sequences: all that may hold blocks. A block is referenced by every table and every copy that it is in.
        """
        references: Counter[int] = Counter(copy.source for copy in self._copies.values())
        unmade = dict(self._copies)
        for sequence in sequences:
            copy = unmade.pop(sequence.id, None)
            assert copy is None or copy.target in sequence.block_table, f"{sequence.id} waits for a copy elsewhere"
            assert len(set(sequence.block_table)) == len(sequence.block_table), f"{sequence.id} holds a block twice"
            references.update(sequence.block_table)
        assert not unmade, "a copy is made for nobody"
        used = {block for block, count in enumerate(self._ref_counts) if count}
        assert all(self._ref_counts[block] == references[block] for block in range(self.num_blocks)), "ref counts"
        assert self.num_shared == sum(count > 1 for count in references.values()), "shared blocks are miscounted"
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is free twice"
        assert len(blank) + len(cached) + len(used) == self.num_blocks, "free + used = total"
        assert blank | cached | used == set(range(self.num_blocks)), "a block is lost or in two places"
        if self._cache is not None:
            self._cache.check()
            assert all(map(self._cache.holds, cached)), "a free block without content waits to be hit"
            assert not any(map(self._cache.holds, blank)), "a blank block can be found"
