"""Videos as frames: from a file, which PyAV decodes, or from a list of pictures."""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from anabatic.core import extras, json_reader
from anabatic.core.errors import DataError
from anabatic.data.vision.picture_files import MAX_SOURCE_PIXELS, decode_uri, load_picture, make_name

VIDEO = "video:"
"""How the source of a video begins; a path, a data URI or a list of pictures in JSON follows."""
MAX_VIDEO_BYTES = 2**31
MAX_VIDEO_FRAMES = 500_000
"""Frames of a file, four hours with 30 of a second; longer ones are not decoded."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg"
"""FFmpeg's names of the containers that are read; others, such as playlists, would open other files."""


@dataclass(frozen=True)
class VideoFacts:
    """What a video is.

    Attributes:
        num_frames: in it.
        rate: frames of a second; 0: they are listed, and nothing says it.
        width, height: in pixels.
    """

    num_frames: int
    rate: float
    width: int
    height: int


def is_video(source: str) -> bool:
    """Return whether a source is that of a video."""
    return source.startswith(VIDEO)


def name_video(value: str | Sequence[str]) -> str:
    """Return the source of a video, which is a path, a data URI, or a list of pictures."""
    return VIDEO + (value if isinstance(value, str) else json.dumps(list(value)))


def split_source(source: str) -> str | list[str]:
    """Return what `name_video` was given, or a picture as it is."""
    value = source.removeprefix(VIDEO)
    return cast(list[str], json_reader.loads(value)) if is_video(source) and value[:1] == "[" else value


def describe_source(source: str) -> str:
    """Return a name for messages: the path, the beginning of a data URI, or the first of the frames."""
    value = split_source(source)
    return make_name(value) if isinstance(value, str) else f"{make_name(value[0])} and {len(value) - 1} more frames"


def measure_video(source: str) -> VideoFacts:
    """Return the facts of a video, none of whose frames is decoded yet, but for the first of listed ones.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: there is no such file, it is no video, or it is too long or too large.
    """
    value = split_source(source)
    if isinstance(value, list):
        width, height = load_picture(value[0]).size
        return VideoFacts(len(value), 0.0, width, height)
    with _open_video(value) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 0)
        count = stream.frames or _count_frames(container, stream)
        if not 0 < count <= MAX_VIDEO_FRAMES:
            what = f"{make_name(value)}: {count:,} frames; videos have 1 to {MAX_VIDEO_FRAMES:,}"
            raise DataError(what, "cut the video" if count else "copy or save it again")
        if not (math.isfinite(rate) and rate > 0):
            raise DataError(f"{make_name(value)}: nothing says how many frames a second has", "save the video again")
        if not 0 < stream.width * stream.height <= MAX_SOURCE_PIXELS:
            what = (
                f"{make_name(value)}: {stream.width:,} x {stream.height:,} pixels are more than {MAX_SOURCE_PIXELS:,}"
            )
            raise DataError(what, "make the video smaller")
        return VideoFacts(count, rate, stream.width, stream.height)


def load_first_frame(source: str) -> Any:
    """Return a picture, or the first frame of a video, as Pillow's image in RGB; errors as of `read_frames`."""
    return next(read_frames(source, [0])) if is_video(source) else load_picture(source)


def check_source(source: str) -> tuple[int, int]:
    """Decode all of a picture or a video; return its width and height.

    Raises:
        ConfigError: Pillow or PyAV is not installed.
        DataError: it cannot be used.
    """
    if not is_video(source):
        width, height = load_picture(source).size
        return width, height
    facts = measure_video(source)
    for _ in read_frames(source, range(facts.num_frames), decode_only=True):
        pass
    return facts.width, facts.height


def read_frames(source: str, frames: Sequence[int], decode_only: bool = False) -> Iterator[Any]:
    """Yield frames as Pillow's images in RGB.

    Args:
        frames: their numbers, none smaller than the one before; one may occur again.
        decode_only: nothing is made of what PyAV decodes.

    Raises:
        ConfigError: PyAV is not installed.
        DataError: the video is torn, or has fewer frames.
    """
    value = split_source(source)
    if isinstance(value, list):
        yield from _read_listed_frames([value[number] for number in frames])
        return
    at, shown = 0, len(frames)
    with _open_video(value) as container:
        for number, frame in enumerate(container.decode(container.streams.video[0])):
            while at < shown and frames[at] == number:
                yield frame if decode_only else frame.to_image()
                at += 1
            if at == shown:
                return
    raise DataError(f"{make_name(value)}: the video is torn: frame {frames[at]} is missing", "copy or save it again")


def _read_listed_frames(pictures: Sequence[str]) -> Iterator[Any]:
    size = None
    for picture in pictures:
        image = load_picture(picture)
        size = size or image.size
        if image.size != size:
            what = f"{make_name(picture)}: a frame of {image.size[0]} x {image.size[1]} pixels, the first has"
            raise DataError(f"{what} {size[0]} x {size[1]}", "make the frames of a video one size")
        yield image


def _count_frames(container: Any, stream: Any) -> int:
    """Count the frames of a container that does not say it, without decoding them."""
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > MAX_VIDEO_FRAMES:
            break
    return count


@contextmanager
def _open_video(value: str) -> Iterator[Any]:
    """Open a video with PyAV; its errors are those of the caller's block too."""
    av = extras.import_optional("av", "reading videos", "or list a video's frames as pictures")
    try:
        with _open_bytes(value) as file, av.open(file, container_options={"format_whitelist": _FORMATS}) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                raise DataError(f"{make_name(value)}: no pictures in it that PyAV decodes", "save it as another format")
            yield container
    except (av.FFmpegError, OSError, EOFError, MemoryError, ValueError) as error:
        what = getattr(error, "strerror", None) or " ".join(str(error).split())[:100] or type(error).__name__
        hint = "copy or save it again; videos are MP4, MOV, MKV, WebM, AVI, MPEG, FLV or GIF files"
        raise DataError(f"{make_name(value)}: no video, or a torn one: {what}", hint) from error


@contextmanager
def _open_bytes(value: str) -> Iterator[Any]:
    if value[:5].lower() == "data:":
        yield io.BytesIO(decode_uri(value, "video"))
        return
    try:
        state = os.stat(value)
        if not stat.S_ISREG(state.st_mode):  # a named pipe would be waited for
            raise DataError(f"{value}: not a regular file", "give the path of a video")
        if state.st_size > MAX_VIDEO_BYTES:
            raise DataError(f"{value}: {state.st_size:,} bytes, more than {MAX_VIDEO_BYTES:,}", "cut the video")
        file = open(value, "rb")  # noqa: SIM115
    except OSError as error:
        hint = "look at the path; in rows it starts from their folder, or from data.media"
        raise DataError(f"{value}: {error.strerror or error}", hint) from error
    with file:
        yield file
