"""An mp4 that can be watched while it is made.

Every chunk is encoded by an encoder of its own and appended as one whole fragment (`moof` and `mdat`) that begins with
a key frame and knows its place in time. So after every chunk the file on disk is a playable one of all chunks so far,
and whatever ends the process leaves it so. A finished film is copied, without coding anything again, into an ordinary
mp4 with its index in front, which takes the file's place by a rename: who still reads the growing one is not disturbed.

Colours are BT.709 and say so.
"""

import io
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import UserError
from rtcwm.model.layout import CLIP_FRAMES, FPS

try:
    import av
    from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
except ImportError as error:
    raise UserError(f"`rtcwm stream` needs av ({error}): pip install 'rtcwm[prepare]'") from error

ENCODER = "libx264"
# Without B-frames a frame's time is its place, and fragments that were made apart join without a gap.
ENCODING = {"preset": "veryfast", "crf": "18", "bf": "0", "g": str(CLIP_FRAMES), "sc_threshold": "0"}
# One fragment a container; its times are those of the whole film, and are not moved to zero.
FRAGMENT = {
    "movflags": "frag_custom+empty_moov+default_base_moof+frag_discont+skip_trailer",
    "avoid_negative_ts": "disabled",
}


class GrowingFilm:
    """A film on disk.

    Attributes:
        path: its file; frames: how many are in it.

    Raises:
        UserError: the file exists and `overwrite` is off, or cannot be made, or av cannot encode H.264.
    """

    def __init__(self, path: Path, height: int, width: int, overwrite: bool = False):
        if ENCODER not in av.codecs_available:
            raise UserError(f"this build of av has no {ENCODER}: pip install --force-reinstall av")
        self.path, self.height, self.width, self.frames = path, height, width, 0
        self._new = not path.exists()
        try:
            # An old film stays whole until there is a first chunk to replace it.
            self._file = path.open("r+b" if overwrite and not self._new else "xb", buffering=0)
        except FileExistsError as fault:
            raise UserError(f"--out {path} exists: name another file, or add --overwrite") from fault
        except OSError as fault:
            raise UserError(f"--out {path} cannot be written ({fault}): name a file in a folder that can be") from fault

    def write(self, frames: np.ndarray) -> None:
        """Append frames, uint8 `[n, height, width, 3]` RGB; when this returns they can be played.

        Raises:
            UserError: the disk refused; the frames before stay.
        """
        if not len(frames):
            return
        head, fragment = cut(self._encoded(frames))
        end = self._file.tell()
        try:
            if not self.frames:
                self._file.truncate()
                fragment = head + fragment
            left = memoryview(fragment)
            while left:
                left = left[self._file.write(left) :]
        except BaseException as fault:
            self._file.truncate(end)
            self._file.seek(end)
            if isinstance(fault, OSError):
                raise UserError(f"cannot write {self.path} ({fault}): its first {self.frames} frames stay") from fault
            raise
        self.frames += len(frames)

    def finish(self) -> str | None:
        """Make it an ordinary mp4; why it stayed a fragmented one, if it did."""
        self.close()
        if self.frames:
            try:
                replace_file(self.path, lambda aside: copy_packets(self.path, aside))
            except (UserError, av.FFmpegError) as fault:
                return f"{self.path} plays, but could not be made an ordinary mp4: {fault}"
        return None

    def close(self) -> None:
        """Let go of the file; one that was made and holds nothing is removed."""
        self._file.close()
        if self._new and not self.frames:
            self.path.unlink(missing_ok=True)

    def _encoded(self, frames: np.ndarray) -> bytes:
        """A fragmented mp4 of these frames alone, at their place in the film."""
        memory = io.BytesIO()
        options = FRAGMENT | {"fragment_index": str(self.frames // CLIP_FRAMES + 1)}
        with av.open(memory, "w", format="mp4", options=options) as file:
            stream = file.add_stream(ENCODER, rate=Fraction(FPS), options=ENCODING)
            stream.width, stream.height, stream.pix_fmt = self.width, self.height, "yuv420p"
            coder = stream.codec_context
            coder.time_base = Fraction(1, FPS)
            coder.colorspace, coder.color_range = Colorspace.ITU709, ColorRange.MPEG
            coder.color_primaries, coder.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
            for place, picture in enumerate(frames, start=self.frames):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                    format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
                )
                frame.pts, frame.time_base = place, Fraction(1, FPS)
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
        return memory.getvalue()


def boxes(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Kind and end of every box of an mp4, in order. A box opens with its size, four bytes, and its kind, four more."""
    end = 0
    while end < len(content):
        kind, end = content[end + 4 : end + 8], end + int.from_bytes(content[end : end + 4], "big")
        yield kind, end


def cut(content: bytes) -> tuple[bytes, bytes]:
    """The head of a fragmented mp4 (what it holds and how it is coded, the same for every chunk), and the rest."""
    end = next(end for kind, end in boxes(content) if kind == b"moov")
    return content[:end], content[end:]


def copy_packets(source: Path, target: Path) -> None:
    """The same video as an ordinary mp4."""
    with (
        av.open(str(source)) as film,
        av.open(str(target), "w", format="mp4", options={"movflags": "faststart"}) as file,
    ):
        stream = film.streams.video[0]
        made = file.add_stream_from_template(stream)
        for packet in film.demux(stream):
            if packet.dts is not None:  # the last one is empty: it flushes decoders
                packet.stream = made
                file.mux(packet)
