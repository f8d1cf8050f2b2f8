"""Parent package of code that comes from a hub, which is imported as `twinkle_registry.code.<name>_<digest>`.

Importing this package installs the finder of those modules, so that they unpickle in any process that has the registry.
"""

from ..trust.loading import install_finder

install_finder()
