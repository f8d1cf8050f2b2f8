"""The options that all scripts of this folder share: where the service is, and sizes."""

import argparse
import os


def arguments(description, **sizes):
    """Parse the command line: `--url`, `--key`, `--model`, and an option with this default for each of `sizes`."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("TWINKLE_SERVER_URL") or "http://127.0.0.1:8000")
    parser.add_argument("--key", default=os.environ.get("TWINKLE_SERVER_TOKEN") or "tml-no-key")
    parser.add_argument("--model", help="name of the served model; by default the first one")
    for name, default in sizes.items():
        kind = str if default is None else type(default)
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


def served_model(client, model):
    """Return the name of the model: the given one, or the first that the service has."""
    return model or client.get_server_capabilities().supported_models[0].model_name


def tinker_model(model):
    """As `served_model`, with the Tinker SDK; call `init_tinker_client` before."""
    import tinker

    return model or tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
