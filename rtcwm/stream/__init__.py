"""Streams made to be watched: frames chunk by chunk, as an mp4 that plays while it grows, or from an iterator."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rtcwm.stream.live import LiveStream, open_stream

__all__ = ["LiveStream", "open_stream"]


def __getattr__(name: str) -> object:
    """Imported when first asked for: the command line reads its flags without PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rtcwm.stream import live

    return getattr(live, name)
