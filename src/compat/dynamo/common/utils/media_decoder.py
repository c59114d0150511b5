"""Options of the decoder on a model's card: `MediaDecoder.enable_image` and `enable_video` take them."""

import logging
import os
from typing import Any, Final

from dynamo.protocol.media import MediaDecoder
from dynamo.settings.readers import integer
from dynamo.settings.table import declared

__all__ = ["build_frontend_image_decoder_options", "enable_frontend_video_decoding"]

logger = logging.getLogger(__name__)

MAX_ALLOC: Final = 128 * 2**20  # bytes of one decoded image
VIDEO_FRAMES: Final = declared(
    "DYN_MM_VIDEO_NUM_FRAMES", integer(1), "Frames of a video, where an engine enables the decoding of videos", unset=32
)


def build_frontend_image_decoder_options(*, max_alloc: int = MAX_ALLOC) -> dict[str, Any]:
    """Return options that bound the memory of a decoded image."""
    return {"limits": {"max_alloc": max_alloc}}


def enable_frontend_video_decoding(decoder: MediaDecoder) -> None:
    """Enable videos of `DYN_MM_VIDEO_NUM_FRAMES` frames. A decoder that takes none is logged, and left as it was."""
    try:
        decoder.enable_video({"max_frames": VIDEO_FRAMES.value(os.environ)})
    except (AttributeError, ValueError) as error:
        logger.warning("decoding of videos is not enabled: %s", error)
