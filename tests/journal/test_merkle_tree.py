"""The Merkle tree of a log: its root and its proofs, against RFC 6962 written down as it stands there."""

import hashlib
import random

import pytest

from agentfsm.journal.checkpoint import extension_proof, leaf_hash, root_hash
from tests.helpers.witness import extends

VECTORS = [  # from the tests of Certificate Transparency
    ("", "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
    ("00", "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"),
    ("10", "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"),
    ("2021", "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"),
    ("3031", "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4"),
    ("40414243", "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef"),
    ("5051525354555657", "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c"),
    ("606162636465666768696a6b6c6d6e6f", "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"),
]


def mth(entries: list[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1."""
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\0" + entries[0]).digest()
    k = 1
    while k * 2 < len(entries):
        k *= 2
    return hashlib.sha256(b"\1" + mth(entries[:k]) + mth(entries[k:])).digest()


def subproof(m: int, entries: list[bytes], whole: bool) -> list[bytes]:
    """SUBPROOF of RFC 6962, section 2.1.2."""
    n, k = len(entries), 1
    if m == n:
        return [] if whole else [mth(entries)]
    while k * 2 < n:
        k *= 2
    if m <= k:
        return [*subproof(m, entries[:k], whole), mth(entries[k:])]
    return [*subproof(m - k, entries[k:], False), mth(entries[:k])]


ENTRIES = [str(n).encode() for n in range(66)]
LEAVES = [leaf_hash(entry) for entry in ENTRIES]


def test_roots_are_those_of_certificate_transparency():
    assert root_hash([]) == hashlib.sha256().digest()
    leaves = [leaf_hash(bytes.fromhex(entry)) for entry, _ in VECTORS]
    assert [root_hash(leaves[: n + 1]).hex() for n in range(len(VECTORS))] == [root for _, root in VECTORS]


def test_roots_and_proofs_are_those_of_the_definition():
    for size in range(1, len(ENTRIES)):
        assert root_hash(LEAVES[:size]) == mth(ENTRIES[:size])
        for old in range(1, size):
            assert extension_proof(LEAVES[:size], old) == subproof(old, ENTRIES[:size], True)


def test_a_proof_holds_for_the_logs_that_it_is_about_and_for_no_other():
    random.seed(3)
    roots = [root_hash(LEAVES[:size]) for size in range(len(LEAVES) + 1)]
    checked = 0
    for size, old in [(larger, smaller) for larger in range(34) for smaller in range(1, larger + 1)]:
        proof = extension_proof(LEAVES[:size], old)
        assert extends(size, roots[size], old, roots[old], proof)
        wrong = [
            (size, roots[size + 1], old, roots[old], proof),
            (size, roots[size], old, roots[old + 1], proof),
            (size, roots[size], old, roots[old], [*proof, roots[0]]),
        ]
        if proof:
            at = random.randrange(len(proof))
            wrong.append((size, roots[size], old, roots[old], [*proof[:at], *proof[at + 1 :]]))
            wrong.append((size, roots[size], old, roots[old], [*proof[:at], roots[0], *proof[at + 1 :]]))
        for case in wrong:
            assert not extends(*case), (size, old)
        checked += len(wrong)
    assert checked > 2500
    assert extends(5, roots[5], 0, roots[0], [])
    assert not extends(5, roots[5], 0, roots[1], [])


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
def test_a_log_that_was_rewritten_has_no_proof(size):
    other = [leaf_hash(b"x"), *LEAVES[1:20]]
    proof = extension_proof(other, size)
    assert extends(20, root_hash(other), size, root_hash(LEAVES[:size]), proof) == (size == 0)
    assert not extends(size, root_hash(other[:size]), 20, root_hash(other), proof)
