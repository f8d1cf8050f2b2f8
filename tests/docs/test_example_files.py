"""The scripts under examples/ have the published structure; examples/README.md runs them."""

import ast
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# The published script for one GPU; only its strings (which model, which data) may differ from ours.
PUBLISHED = """
from twinkle.model import TransformersModel
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta

def train():
    dataset = Dataset(dataset_meta=DatasetMeta('ms://swift/self-cognition'))
    dataset.set_template('Template', model_id='ms://Qwen/Qwen3.5-4B')
    dataset.encode()

    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id='ms://Qwen/Qwen3.5-4B')

    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()

if __name__ == '__main__':
    train()
"""


def structure(source: str) -> tuple[set[str], list[str]]:
    """Return the imports (their order is a matter of taste) and every other statement, references made equal."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "://" in node.value:
            node.value = "scheme://"
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    imports = {ast.dump(node) for node in body if isinstance(node, ast.ImportFrom)}
    return imports, [ast.dump(node) for node in body if not isinstance(node, ast.ImportFrom)]


def test_the_single_gpu_script_is_the_published_one_but_for_its_model_and_data() -> None:
    assert structure((EXAMPLES / "single_gpu.py").read_text("utf-8")) == structure(PUBLISHED)
