"""Decides which code may run: policy, lock, code store, signatures, revocation, and the import of code from a hub.

From the bottom up: `reference`, `store`, `signatures`, `revocation`, `policy`, `lock`, `download`, `loading` and, for
the commands that change what is trusted, `review` and `editor`. `folders` records the folders that the user trusts;
`frozen` compares installed distributions with the lock.
"""
