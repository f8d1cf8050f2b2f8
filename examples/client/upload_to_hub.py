"""Upload a checkpoint of a service to Hugging Face (`hf://owner/name`) or ModelScope (`ms://owner/name`).

The token is yours: `HF_TOKEN` or `MODELSCOPE_API_TOKEN`. The repository is private. Without `--checkpoint`, it is the
newest checkpoint of this key.

python examples/client/upload_to_hub.py --repository hf://owner/name
"""

from arguments import arguments

from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel


def upload(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    path = options.checkpoint
    for run in client.list_training_runs() if path is None else ():
        path = path or client.get_latest_checkpoint_path(run.training_run_id)
    if path is None:
        raise SystemExit("this key has no checkpoint; train one with self_cognition.py")
    done = MultiLoraTransformersModel(options.model).upload_to_hub(
        checkpoint_dir=path,
        hub_model_id=options.repository,
        async_upload=False,
        poll_interval=options.poll_seconds,
        progress=lambda state: print(state["status"], flush=True),
    )
    print(f"{path} is at {done['url']}")
    client.close()


if __name__ == "__main__":
    upload(arguments(__doc__, repository="hf://owner/name", checkpoint=None, poll_seconds=2.0))
