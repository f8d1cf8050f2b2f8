"""Scaffolds of plugins, one for each kind of component that plugin authors write.

`scaffold/` is a copier template. Its `package/` (and `hub-repo/`) has the common files, `kinds/<kind>/` those of a
kind.
"""
