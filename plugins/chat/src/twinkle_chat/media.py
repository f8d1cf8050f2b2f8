"""Multimodal methods of text-only templates, which refuse images, video and audio."""

from collections.abc import Sequence
from typing import Any, NoReturn

from twinkle.errors import Unsupported


class TextOnly:
    """The multimodal methods of a template; a multimodal template overrides them."""

    image_placeholder = "<image>"
    video_placeholder = "<video>"
    audio_placeholder = "<audio>"

    @property
    def is_mm(self) -> bool:
        """Whether the template reads images, video or audio."""
        return False

    def preprocess_image(self, image: Any) -> Any:
        """Convert an image to model input; unsupported by text templates."""
        self._refuse("an image")

    def preprocess_video(self, video: Any) -> Any:
        """Convert a video to model input; unsupported by text templates."""
        self._refuse("a video")

    def preprocess_audio(self, audio: Any) -> Any:
        """Convert a sound to model input; unsupported by text templates."""
        self._refuse("a sound")

    def preprocess_images(self, images: Sequence[Any]) -> list[Any]:
        """Return `preprocess_image` of each."""
        return [self.preprocess_image(image) for image in images]

    def preprocess_videos(self, videos: Sequence[Any]) -> list[Any]:
        """Return `preprocess_video` of each."""
        return [self.preprocess_video(video) for video in videos]

    def preprocess_audios(self, audios: Sequence[Any]) -> list[Any]:
        """Return `preprocess_audio` of each."""
        return [self.preprocess_audio(audio) for audio in audios]

    def set_mm_position_ids(self, input_feature: Any) -> Any:
        """Return the feature; text has plain positions."""
        return input_feature

    def get_vllm_input_ids(self, input_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids in the form that vLLM requires; unchanged for text."""
        return input_ids

    def pre_forward_hook(self, model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the model's forward; unchanged for text."""
        return args, kwargs

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} reads text only, got {what}; use a multimodal template")
