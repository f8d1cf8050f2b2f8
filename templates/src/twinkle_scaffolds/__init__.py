"""Scaffolds of plugins: one for every kind of component that people write.

`scaffold/` is one copier template. What all kinds share is in its `package/` (and `hub-repo/`), what differs is in
`kinds/<kind>/`.
"""
