"""The Merkle tree of a transparency log (RFC 6962): its root, and proofs that a longer log extends a shorter one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

__all__ = ["extension_proof", "leaf_hash", "root_hash"]


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an entry."""
    return hashlib.sha256(b"\0" + entry).digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def root_hash(leaves: Iterable[bytes]) -> bytes:
    """The root of a tree, in one pass and with memory for its height only.

    Args:
        leaves: The hashes of its entries.
    """
    peaks: list[bytes] = []  # the roots of its complete subtrees, the largest first
    for number, leaf in enumerate(leaves, 1):
        node, size = leaf, number
        while not size & 1:  # this leaf completes a subtree
            node, size = _node_hash(peaks.pop(), node), size >> 1
        peaks.append(node)
    root = peaks.pop() if peaks else hashlib.sha256().digest()
    while peaks:
        root = _node_hash(peaks.pop(), root)
    return root


def extension_proof(leaves: Sequence[bytes], size: int) -> list[bytes]:
    """The hashes with which somebody who has only two roots can check that one tree extends the other.

    Args:
        leaves: The hashes of the longer log's entries.
        size: The number of entries of the shorter one.
    """
    if not 0 < size < len(leaves):
        return []
    proof: list[bytes] = []
    begin, end, whole = 0, len(leaves), True  # the subtree in which the shorter log ends; whole: it begins the tree
    while begin + size < end:
        middle = 1 << (end - begin - 1).bit_length() - 1
        if size <= middle:
            proof.append(root_hash(leaves[begin + middle : end]))
            end = begin + middle
        else:
            proof.append(root_hash(leaves[begin : begin + middle]))
            begin, size, whole = begin + middle, size - middle, False
    if not whole:
        proof.append(root_hash(leaves[begin:end]))
    return proof[::-1]
