"""In a checkout the workbench depends on the folders beside it; in a release, on their pinned versions."""

import os
import tomllib
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class WorkbenchMetadataHook(MetadataHookInterface):
    """Fill `dependencies` of the meta distribution from `[tool.hatch.metadata.hooks.custom] members`."""

    def update(self, metadata: dict) -> None:
        """Add one requirement a member: a direct reference to its folder, or a pin under TWINKLE_RELEASE=1."""
        release = os.environ.get("TWINKLE_RELEASE") == "1"
        requirements = []
        for member in self.config["members"]:
            folder = Path(self.root, member)
            project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
            where = f"=={project['version']}" if release else f" @ {folder.as_uri()}"
            requirements.append(project["name"] + where)
        metadata["dependencies"] = requirements
