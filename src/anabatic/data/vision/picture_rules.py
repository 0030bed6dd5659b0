"""Sizes, normalization and tokens that a model wants of its pictures, and which frames of a video, with what words.

The arithmetic is that of transformers' Qwen2-VL image processors, which Qwen2.5-VL and Qwen3-VL share
(models/qwen2_vl/image_processing_pil_qwen2_vl.py), that of GLM-4V's (models/glm4v/image_processing_pil_glm4v.py), and
that of tiles of one size, which InternVL has (models/got_ocr2/image_processing_pil_got_ocr2.py); of videos that of the
video processors (models/qwen2_vl/video_processing_qwen2_vl.py, which Qwen2.5-VL has, models/qwen3_vl/, models/glm4v/,
models/glm46v/). The words are those of the processors beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from anabatic.data.vision.picture_cache import PictureCache

MAX_RATIO = 200
"""Longer side over shorter side, at most."""
_MAX_GLM46V_FRAMES, _MAX_GLM46V_SECONDS = 640, 2400
_GLM46V_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Longest duration in seconds -> temporal patches a second (transformers, models/glm46v/video_processing_glm46v.py)."""
_WORDS = {
    "Qwen2VL": "{frame}",
    "Qwen3VL": "<{mean:.1f} seconds>{start}{frame}{end}",
    "Glm4v": "{start}{frame}{end}{second}",
    "Glm46V": "{start}{frame}{end}{first:.1f} seconds",
}
"""Kind -> what stands for a temporal patch in the text, by the times of its frames."""


@dataclass(frozen=True)
class PictureRules:
    """What decides the patches and tokens of a picture.

    Attributes:
        image_token: id of the token that a picture is made of; start_token, end_token: those around it. None: those
            that the tokenizer names.
        patch: side of a patch in pixels; merge: patches on a side of a token; frames: equal frames of a still picture.
        min_pixels, max_pixels: of the resized picture.
        resample: Pillow's number of the filter.
        scale: factor on a value from 0 to 255, before `(x - mean) / std` for each color.
        counts_frames: the bounds count the pixels of all `frames`, and a side shorter than a token is made one first
            (GLM-4V).
        box_form: how places of objects are written, a key of `row_objects`; empty: it is not known here.
        boxes_are_thousandths: they count thousandths of the picture's sides, not pixels of the resized picture.
        video: what decides the frames of a video; None: the model reads none that are known here.
        cache: keeps resized pictures; it decides nothing.
    """

    image_token: int
    start_token: int | None
    end_token: int | None
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts_frames: bool = False
    box_form: str = ""
    boxes_are_thousandths: bool = True
    video: VideoRules | None = None
    cache: PictureCache | None = None

    axes = 3
    """Of positions: time, height and width."""
    adds_borders = False
    """The chat template leaves the tokens around a picture to the processor."""

    @property
    def unit(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge

    @property
    def feature_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that pictures and frames are made of."""
        return (self.image_token,) if self.video is None else (self.image_token, self.video.image_token)

    def find_features(self, ids: np.ndarray) -> np.ndarray:
        """Return which of `ids`, `[n]`, are tokens of pictures, bool `[n]`."""
        return np.isin(ids, self.feature_tokens)

    def fit_grid(self, height: int, width: int, num_frames: int = 0) -> tuple[int, int]:
        """Return the rows and columns of patches of a picture of so many pixels.

        Args:
            num_frames: of a video, whose bounds count the pixels of all of them.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"one side is more than {MAX_RATIO} times the other ({width} x {height} pixels)")
        unit, frames = self.unit, (num_frames or self.frames) if self.counts_frames else 1
        counted = round(frames / self.frames) * self.frames if self.counts_frames else 1
        if self.counts_frames and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        # Python's round goes to the even number, as the processor's does.
        rows, columns = (round(side / unit) for side in (height, width))
        if counted * rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif counted * rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def count_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of a picture with that many rows and columns of patches."""
        return grid[0] * grid[1] // self.merge**2

    def list_sheets(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the rows and columns of patches that a picture is resized to and cut into, one time or several."""
        return [self.fit_grid(height, width)]

    def describe_sizes(self) -> dict[str, Any]:
        """Return the sizes as the processor's file names them."""
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}


@dataclass(frozen=True)
class TileRules(PictureRules):
    """What decides the tiles of a picture, all of one size: a tile is a patch, and becomes a fixed number of tokens.

    Attributes:
        tile_tokens: tokens of a tile.
    """

    tile_tokens: int = 1

    axes = 1
    adds_borders = True

    def fit_grid(self, height: int, width: int, num_frames: int = 0) -> tuple[int, int]:
        """Return the number of tiles of a picture of so many pixels, and 1."""
        return sum(rows * columns for rows, columns in self.list_sheets(height, width)), 1

    def count_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of that many tiles."""
        return grid[0] * self.tile_tokens

    def describe_sizes(self) -> dict[str, Any]:
        """Return the numbers of tiles as the processor's file names them."""
        fewest, most = self.count_tiles()
        return {"min_patches": fewest, "max_patches": most}

    def count_tiles(self) -> tuple[int, int]:
        """Return the smallest and the largest number of tiles."""
        return max(1, math.ceil(self.min_pixels / self.patch**2)), max(1, self.max_pixels // self.patch**2)

    def list_sheets(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the rows and columns of tiles whose ratio is nearest to the picture's, and one tile that shows all of
        it; of equal ratios the larger one, unless that makes the picture more than twice as large."""
        area, (fewest, most) = self.patch**2, self.count_tiles()
        shapes = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        best, nearest = (1, 1), math.inf
        for rows, columns in sorted(shapes, key=math.prod):
            distance = abs(width / height - columns / rows)
            is_large = distance == nearest and height * width > 0.5 * area * rows * columns
            if rows * columns >= fewest and (distance < nearest or is_large):
                best, nearest = (rows, columns), distance
        return [best] if best == (1, 1) else [best, (1, 1)]


@dataclass(frozen=True)
class VideoRules(PictureRules):
    """Rules for the patches and tokens of a video; `image_token` is that of its frames.

    Attributes:
        kind: processor whose rules these are: Qwen2VL, Qwen3VL, Glm4v or Glm46V.
        written_token: id of the token that the chat template writes for a video.
        fps: frames shown of a second; of listed frames, how many there are of one.
        min_frames, max_frames: frames shown.
        max_duration: seconds of which `fps` are shown (Glm4v).
        positions_per_second: of the time axis; 0: each temporal patch is placed in the text like a picture.
        budget: tokens whose pixels bound a frame's (`cap_pixels_per_frame`); 0: nothing beside `max_pixels` does.
    """

    kind: str = ""
    written_token: int = 0
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_duration: float = 300.0
    positions_per_second: float = 0.0
    budget: int = 0

    def fit_frames(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Return the rows and columns of patches of each frame.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        most, least = self.max_pixels, int(self.min_pixels * 1.05)
        if self.budget and self.kind == "Qwen2VL":
            most = max(min(most, int(self.budget * self.unit**2 * 0.9) * self.frames // num_frames), least)
        elif self.budget:
            most = max(min(self.budget * self.unit**2, most // num_frames), least) * num_frames
        return replace(self, max_pixels=most).fit_grid(height, width, num_frames)

    def sample_frames(self, total: int, rate: float) -> list[int]:
        """Return which of a video's frames are shown, in order; GLM-V may show one twice.

        Args:
            total: frames of the video.
            rate: frames of a second.
        """
        if self.kind == "Qwen3VL":
            shown = min(max(int(total / rate * self.fps), self.min_frames), self.max_frames, total)
            return [int(at) for at in np.linspace(0, total - 1, shown).round()]
        if self.kind == "Qwen2VL":
            most = min(self.max_frames, total) // self.frames * self.frames
            shown = int(min(max(total / rate * self.fps, self.min_frames), most) // self.frames) * self.frames
            return _spread_frames(total, total / shown) if shown else []
        found = self._sample_glm46v(total, rate) if self.kind == "Glm46V" else self._sample_glm4v(total, rate)
        found = list(dict.fromkeys(found))
        return found + found[-1:] * (len(found) % 2)

    def _sample_glm4v(self, total: int, rate: float) -> list[int]:
        duration, last = total / rate, total - 1
        if duration <= self.max_duration:
            shown = max(math.floor(duration * self.fps), 1)
            return [min(last, math.ceil(number * rate / self.fps)) for number in range(shown)]
        shown = int(self.max_duration * self.fps)
        if shown >= total:
            return list(range(total))
        return [min(last, math.ceil(second * rate)) for second in np.linspace(0, duration, shown)]

    def _sample_glm46v(self, total: int, rate: float) -> list[int]:
        duration = total / rate
        bounded = min(duration, _MAX_GLM46V_SECONDS)
        patches = next(each for longest, each in _GLM46V_RATES if bounded <= longest)
        wanted = min(int(bounded * patches * self.frames), _MAX_GLM46V_FRAMES)
        if total < wanted:
            found = np.linspace(0, total - 1, wanted, dtype=int).tolist()
        else:
            found, second = [], 0.0
            for number in range(total):
                if number * (1 / rate) >= second:
                    found.append(number)
                    second += 1 / (self.frames * patches)
                    if second >= int(duration):
                        break
        if len(found) < wanted:
            found = np.linspace(found[0], found[-1], wanted, dtype=int).tolist()
        elif len(found) > wanted:
            found = np.linspace(0, total - 1, wanted, dtype=int).tolist()
        return list(found)

    def write_frames(self, frames: Sequence[int], rate: float, tokens: tuple[str, str, str]) -> str:
        """Return what stands for a video in the text, one token for each run of its tokens.

        Args:
            frames: which are shown, of whole temporal patches.
            rate: frames of a second.
            tokens: before a temporal patch, of it, and behind it.
        """
        if self.positions_per_second:
            return tokens[1]
        words = dict(zip(("start", "frame", "end"), tokens, strict=True))
        texts = []
        for at in range(0, len(frames), self.frames):
            first, last = frames[at] / rate, frames[at + self.frames - 1] / rate
            texts.append(_WORDS[self.kind].format(first=first, second=int(first), mean=(first + last) / 2, **words))
        return "".join(texts)

    def describe_class(self) -> dict[str, Any]:
        """Return the file of a processor with these rules; what it lacks is that of the class."""
        colors = {"image_mean": list(self.mean), "image_std": list(self.std)}
        shown = {"do_sample_frames": True, "min_frames": self.min_frames}
        return {"video_processor_type": f"{self.kind}VideoProcessor", **shown, **colors, **self.describe_sizes()}

    def describe_sizes(self) -> dict[str, Any]:
        """Return the sizes, and numbers of frames that are not the usual ones, as the processor's file names them."""
        usual = {"fps": VideoRules.fps, "max_frames": VideoRules.max_frames}
        chosen = {"fps": self.fps} if self.kind[:3] == "Glm" else {"fps": self.fps, "max_frames": self.max_frames}
        return {**super().describe_sizes(), **{key: value for key, value in chosen.items() if value != usual[key]}}


def _spread_frames(total: int, step: float) -> list[int]:
    """Return the numbers below `total` that `torch.arange` gives in float32, cut to whole ones."""
    return [int(at) for at in (np.arange(math.ceil(total / step)) * step).astype(np.float32)]
