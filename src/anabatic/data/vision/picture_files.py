"""Pictures from files and data URIs, opened by Pillow within limits: what cannot be a picture is an error by name."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import struct
import warnings
import zlib
from typing import Any

from anabatic.core import extras
from anabatic.core.errors import DataError

MAX_SOURCE_PIXELS = 64 * 2**20
"""Pixels of a picture before it is made smaller; more are not decoded."""
_MAX_FILE_BYTES = 64 * 2**20
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Pillow's names of the formats that are read; others would start programs (EPS) or are no pictures of rows."""
_DEEP_MODES = ("I", "F")
"""First letter of Pillow's modes of more than 8 bits a color, which have no agreed way to 8 bits."""
_DATA_URI = re.compile(r"data:(image|video)/[\w.+-]+;base64,", re.IGNORECASE)
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError)
"""Raised by Pillow's readers for damaged files; OSError includes files that are no pictures."""


def load_picture(source: str) -> Any:
    """Return the decoded picture as Pillow's image in RGB, turned as its EXIF says; of an animation the first frame.

    Args:
        source: a path, or a data URI.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: there is no such file, it is no picture, torn, or too large; `make_name` says which one.
    """
    return decode_picture(read_bytes(source), source)


def decode_picture(data: bytes, source: str) -> Any:
    """Return the same of a picture whose bytes were read; errors as of `load_picture`."""
    images = extras.import_optional("PIL.Image", "reading pictures", "")
    turning = extras.import_optional("PIL.ImageOps", "reading pictures", "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes and tags; the size is checked here
            image = images.open(io.BytesIO(data), formats=_FORMATS)
            _require_size(source, *image.size)
            if image.mode[:1] in _DEEP_MODES:
                raise DataError(
                    f"{make_name(source)}: {image.mode} has more than 8 bits a color", "save it as 8-bit PNG or JPEG"
                )
            image.load()
            turned = turning.exif_transpose(image)
            return turned if turned.mode == "RGB" else turned.convert("RGB")
    except images.UnidentifiedImageError as error:
        raise DataError(
            f"{make_name(source)}: not a picture ({len(data):,} bytes)",
            "pictures are JPEG, PNG, WebP, GIF, BMP or TIFF files",
        ) from error
    except images.DecompressionBombError as error:
        raise _make_size_error(source, "its") from error
    except MemoryError as error:
        raise DataError(f"{make_name(source)}: no memory to decode it", "make the picture smaller") from error
    except _BROKEN as error:
        what = " ".join(str(error).split())[:100] or type(error).__name__
        raise DataError(f"{make_name(source)}: the picture is torn: {what}", "copy or save it again") from error


def measure_picture(source: str) -> tuple[int, int]:
    """Return the width and height that a picture's header names; nothing is decoded. Errors as of `load_picture`."""
    images = extras.import_optional("PIL.Image", "reading pictures", "")
    try:
        with images.open(io.BytesIO(read_bytes(source)), formats=_FORMATS) as image:
            width, height = image.size
    except (images.DecompressionBombError, *_BROKEN) as error:
        raise DataError(f"{make_name(source)}: no picture that can be read: {error}"[:300], "copy it again") from error
    _require_size(source, width, height)
    return width, height


def make_name(source: str) -> str:
    """Return a picture's name for messages: its path, or the beginning of its data URI."""
    return source if len(source) <= 200 or not source.startswith("data:") else f"{source[:40]}..."


def decode_uri(source: str, kind: str) -> bytes:
    """Return what a data URI of that kind, image or video, holds.

    Raises:
        DataError: it is of another kind, or broken.
    """
    head = _DATA_URI.match(source)
    if head is None or head[1].lower() != kind:
        raise DataError(f"{make_name(source)[:60]}: not data:{kind}/TYPE;base64", f"write {kind}s in base64")
    try:
        return base64.b64decode(source[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{make_name(source)}: broken base64: {error}", f"write the {kind} again") from error


def read_bytes(source: str) -> bytes:
    """Return the bytes of a picture's file; errors as of `load_picture`."""
    if source[:5].lower() == "data:":
        data = decode_uri(source, "image")
    else:
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):  # a named pipe would be waited for
                raise DataError(f"{source}: not a regular file", "give the path of a picture")
            with open(source, "rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{source}: {reason}", "look at the path; in rows it starts from their folder, or from data.media"
            ) from error
    if len(data) > _MAX_FILE_BYTES:
        raise DataError(f"{make_name(source)}: more than {_MAX_FILE_BYTES:,} bytes", "make the picture smaller")
    return data


def _require_size(source: str, width: int, height: int) -> None:
    if width * height > MAX_SOURCE_PIXELS:
        raise _make_size_error(source, f"{width:,} x {height:,}")


def _make_size_error(source: str, pixels: str) -> DataError:
    limit = f"{pixels} pixels are more than {MAX_SOURCE_PIXELS:,}, which are not decoded"
    return DataError(f"{make_name(source)}: {limit}", "make the picture smaller")
