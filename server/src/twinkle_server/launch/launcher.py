"""`launch_server` and `ServerLauncher`, as published."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from twinkle.errors import ArgumentError, ConfigError
from twinkle.logging import get_logger
from twinkle_server.launch.config import ServerConfig
from twinkle_server.launch.mapping import Mapped, map_config

CONFIG: Final = "TWINKLE_SERVER_CONFIG"
_FOLDER: Final = "TWINKLE_DEFAULT_SAVE_DIR"


def read_config(path: str | Path) -> ServerConfig:
    """Read a published configuration file.

    Raises:
        ConfigError: it does not exist, is not YAML, or has an unknown or invalid key; the message names all of them.
    """
    file = Path(path).expanduser()
    try:
        fields = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    return parse_config(fields, str(file))


def parse_config(fields: Any, what: str = "the configuration") -> ServerConfig:
    """Validate the content of a published configuration.

    Raises:
        ConfigError: see `read_config`.
    """
    try:
        return ServerConfig.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [f"{'.'.join(map(str, problem['loc'])) or what}: {problem['msg']}" for problem in problems]
        raise ConfigError(f"{what} is invalid: {'; '.join(lines[:8])}") from error


class ServerLauncher:
    """Starts a service from a published configuration.

    Args:
        config: the configuration, or its content as a mapping.
        ray_namespace: accepted as published; the service does not use Ray.
    """

    def __init__(self, config: ServerConfig | Mapping[str, Any], ray_namespace: str | None = None) -> None:
        self.config = config if isinstance(config, ServerConfig) else parse_config(dict(config))
        if ray_namespace is not None:
            self.config = self.config.model_copy(update={"ray_namespace": ray_namespace})

    def mapped(self) -> Mapped:
        """Return the settings of the service, and what it does in another way than the configuration says.

        Raises:
            ConfigError: the service does not have something that the configuration asks for.
        """
        return map_config(self.config, Path(os.environ.get(_FOLDER, "").strip() or "outputs"))

    def launch(self) -> int:
        """Serve until SIGTERM or SIGINT, and return the exit code.

        Losses, metrics, rewards and other components that the running script defines are offered to tenants by name.

        Raises:
            ConfigError: see `mapped`.
            ModelLoadError: the model does not exist, or cannot be loaded.
            OutputError: the address cannot be used.
        """
        from twinkle_server.launch import script
        from twinkle_server.serve import serve

        script.check_not_loading()
        mapped = self.mapped()
        for note in mapped.notes:
            get_logger().warning("%s", note)
        with script.offered() as plugins:
            settings = mapped.settings
            return serve(replace(settings, in_process_losses=(*settings.in_process_losses, *plugins)))


def launch_server(
    config: ServerConfig | Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    ray_namespace: str | None = None,
) -> int:
    """Serve a published configuration until SIGTERM or SIGINT, and return the exit code.

    Tenants can name the losses, metrics, rewards, templates, preprocessors, filters, processors, optimizers and
    schedulers that the running script defines. For that, the processes of the service import it, up to this call.

    Args:
        config: the configuration, or its content as a mapping.
        config_path: its file; by default that of `TWINKLE_SERVER_CONFIG`.
        ray_namespace: accepted as published; the service does not use Ray.

    Raises:
        ArgumentError: there is no configuration, or there are two.
        ConfigError: it is invalid, or asks for something that the service does not have.
    """
    from twinkle_server.launch.script import check_not_loading

    check_not_loading()
    if config is not None and config_path is not None:
        raise ArgumentError("launch_server takes config or config_path, not both")
    if config is None:
        path = config_path or os.environ.get(CONFIG, "").strip()
        if not path:
            raise ArgumentError(f"launch_server requires config= or config_path=, or {CONFIG} in the environment")
        config = read_config(path)
    return ServerLauncher(config, ray_namespace).launch()
