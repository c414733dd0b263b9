"""A witness of checkpoints, which has two of them and a proof, and neither the log nor any code that made the proof."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from agentfsm.journal.checkpoint import Checkpoint


def is_extension(new: Checkpoint, old: Checkpoint, proof: str) -> bool:
    """Whether the log of a checkpoint begins with that of an older one, by two checkpoints and a proof alone.

    Args:
        new: The new checkpoint.
        old: The older one.
        proof: The text of ``CheckpointLog.proof`` for the older one's size.
    """
    first, *lines = proof.splitlines() or [""]
    try:
        hashes = [base64.b64decode(line, validate=True) for line in lines]
    except ValueError:
        return False
    return first == f"old {old.size}" and extends(new.size, new.root, old.size, old.root, hashes)


def extends(size: int, root: bytes, old_size: int, old_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether a tree begins with all entries of an older one, by the algorithm of RFC 9162, section 2.1.4.2.

    Args:
        size: The number of its entries.
        root: Its root.
        old_size: The number of entries of the older one.
        old_root: The root of the older one.
        proof: The hashes of the proof.
    """
    if old_size == size or not old_size:  # every log extends an empty one
        return old_root == (root if old_size == size else hashlib.sha256().digest()) and not proof
    if not 0 < old_size < size:
        return False
    path = list(proof) if old_size & (old_size - 1) else [old_root, *proof]
    if not path:
        return False
    old, new = old_size - 1, size - 1
    while old & 1:
        old, new = old >> 1, new >> 1
    old_node = new_node = path[0]
    for node in path[1:]:
        if not new:
            return False
        if old & 1 or old == new:
            old_node, new_node = _node_hash(node, old_node), _node_hash(node, new_node)
            while old and not old & 1:
                old, new = old >> 1, new >> 1
        else:
            new_node = _node_hash(new_node, node)
        old, new = old >> 1, new >> 1
    return not new and (old_node, new_node) == (old_root, root)


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()
