"""The one place that decides whether a tree in the store may be imported, asked again for every process.

Policy first, then the lock, then the hash of every file, then signatures where the policy wants them.
"""

from __future__ import annotations

from ..errors import NotTrusted
from ..locked import LOCK_VARIABLE, is_frozen
from .lock import Lock
from .policy import Policy, why_not_trusted
from .reference import HubReference, Origin
from .signatures import check_signature
from .store import Store
from .tree import Tree

ADD = "; add it there with: twinkle plugins add"


def checked_tree(digest: str, *, asked: str) -> Tree:
    """Return the tree whose digest begins with `digest`, if it may run here and is whole.

    Raises:
        NotTrusted: Nobody allowed it, or a file of it was changed.
        ModuleNotFoundError: The store has no such tree.
    """
    lock = Lock.load()
    entries = lock.of_tree(digest)
    tree = Store().tree(entries[0].digest if entries else digest)
    if tree is None:
        known = f"; it is {entries[0].reference}, run: twinkle plugins verify --fetch" if entries else ""
        raise ModuleNotFoundError(
            f"{asked}: the code {digest} is not in the store of this machine, {Store().root}{known or ADD}"
        )
    ways = [(HubReference.parse(entry.reference, asked=asked), entry.origin) for entry in entries]
    if not entries:
        refuse_unlocked(asked, lock)
        ways = [(HubReference(origin.scheme, origin.repo), origin) for origin in Store().origins(tree.digest)]
    allow(Policy.load(fetch=True), ways, tree, locked=bool(entries), asked=asked)
    tree.verify()
    return tree


def refuse_unlocked(asked: str, lock: Lock) -> None:
    """Raise `NotTrusted` if this run is frozen; called for code that no lock lists."""
    if is_frozen():
        raise NotTrusted(
            f"{asked}: this run is frozen, and {lock.lacks('it')}; "
            f"add it with 'twinkle plugins add' where it is not frozen, or "
            f"name the right lock by {LOCK_VARIABLE}"
        )


def allow(policy: Policy, ways: list[tuple[HubReference, Origin]], tree: Tree, *, locked: bool, asked: str) -> None:
    """Let a tree pass if one of the ways in which it came here is trusted, and it is signed as the policy wants it.

    What is revoked does not pass, whichever way it came.
    """
    reasons = []
    for _, origin in ways:
        if reason := policy.revokes(origin, tree.digest):
            raise NotTrusted(f"{asked}: code from {origin} must not run any more: {reason}")
    for reference, origin in ways:
        reason = why_not_trusted(policy, reference, origin, locked=locked, digest=tree.digest)
        if not reason:
            for signer in policy.signers(origin):
                check_signature(tree, signer, asked=asked)
            return
        reasons.append(reason)
    raise NotTrusted(f"{asked}: {reasons[0] if reasons else 'nothing says where this code came from'}")
