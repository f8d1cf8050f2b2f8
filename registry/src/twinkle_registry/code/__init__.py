"""Code from a Hub, and the parent of the modules it is imported as: `twinkle_registry.code.<name>_<digest>`.

Importing this package installs the finder of those modules, so they unpickle in any process that has this package.
"""

from .finder import install

install()
