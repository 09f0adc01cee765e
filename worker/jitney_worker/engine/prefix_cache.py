"""Which blocks hold which tokens: a chained hash of full blocks, confirmed against the tokens themselves."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from jitney_worker.engine.sequence import Sequence

HashBlock = Callable[[bytes], bytes]
"""Digest of (parent's digest, token ids). Tests put a weak one here: a collision must cost a miss, never a mix-up."""


def sha256_digest(payload: bytes) -> bytes:
    """The chain's hash."""
    return sha256(payload).digest()


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds: these tokens, after that parent.

    serial: number of this content, never used twice. parent: the parent's serial, or for a first block the
    salt. A serial names content beyond doubt where a hash only suggests it, so a hit needs no trust in hashes.
    """

    key: bytes
    serial: int
    parent: int | str
    token_ids: tuple[int, ...]


class PrefixCache:
    """Content of blocks, by chained hash. Knows nothing of who uses a block, or whether anybody does.

    One block per key: where two contents collide, the newer replaces the older.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_block: HashBlock = sha256_digest) -> None:
        self._block_size = block_size
        self._hash_block = hash_block
        self._blocks: dict[bytes, int] = {}
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, block: int) -> bool:
        """True if the block can be found by its content."""
        return self._contents[block] is not None

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the first tokens of a sequence, in order.

        At least one known token is left over: somebody has to produce the logits after it.
        """
        blocks: list[int] = []
        parent: int | str = sequence.request.cache_salt
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            block = self._blocks.get(self._key(sequence, index))
            content = None if block is None else self._contents[block]
            if block is None or content is None or content.parent != parent:
                break
            if content.token_ids != self._tokens(sequence, index):
                break
            blocks.append(block)
            parent = content.serial
        return blocks

    def serials(self, blocks: list[int]) -> list[int]:
        """Serials of matched blocks."""
        return [content.serial for content in map(self._contents.__getitem__, blocks) if content is not None]

    def enter(self, sequence: Sequence) -> list[int]:
        """Enter the full, computed blocks of a sequence that are not entered yet; return the blocks displaced.

        A block whose content another block already holds is not entered, but takes on that content's serial,
        so that the chain goes on.
        """
        displaced: list[int] = []
        serials = sequence.block_serials
        for index in range(len(serials), sequence.num_computed_tokens // self._block_size):
            key, tokens = self._key(sequence, index), self._tokens(sequence, index)
            parent: int | str = serials[-1] if serials else sequence.request.cache_salt
            known = self._blocks.get(key)
            content = None if known is None else self._contents[known]
            if known is not None and content is not None:
                if content.parent == parent and content.token_ids == tokens:
                    serials.append(content.serial)
                    continue
                self.forget(known)
                displaced.append(known)
            serials.append(self._hold(sequence.block_table[index], key, parent, tokens))
        return displaced

    def forget(self, block: int) -> None:
        """The block's content can no longer be found."""
        content = self._contents[block]
        if content is not None:
            self._contents[block] = None
            del self._blocks[content.key]

    def _hold(self, block: int, key: bytes, parent: int | str, tokens: tuple[int, ...]) -> int:
        self._last_serial += 1
        self._contents[block] = BlockContent(key, self._last_serial, parent, tokens)
        self._blocks[key] = block
        return self._last_serial

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(sequence.token_ids[start : start + self._block_size])

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Chained digest of the block; computed once per block, kept with the sequence."""
        keys = sequence.block_keys
        while len(keys) <= index:
            parent = keys[-1] if keys else self._hash_block(sequence.request.cache_salt.encode())
            keys.append(self._hash_block(parent + array("q", self._tokens(sequence, len(keys))).tobytes()))
        return keys[index]

    def check(self) -> None:
        """Assert that the index and the contents say the same."""
        held = {content.key: block for block, content in enumerate(self._contents) if content is not None}
        assert held == self._blocks, "the prefix cache finds blocks that do not hold what it says"
        for content in self._contents:
            assert content is None or len(content.token_ids) == self._block_size, "a block is cached before it is full"
