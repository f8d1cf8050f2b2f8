"""What tests of Twinkle and of its plugins share: tiny models made on the spot, with tokenizer and chat template."""

from twinkle.testing.models import CHATML, tiny_config, tiny_model, tiny_tokenizer

__all__ = ["CHATML", "tiny_config", "tiny_model", "tiny_tokenizer"]
