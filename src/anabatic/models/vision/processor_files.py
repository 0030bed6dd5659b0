"""Files of a model folder that say how its pictures are read: kept beside the weights of what is trained."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

from anabatic.core import json_reader
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.rule_files import PREPROCESSOR_FILE, PROCESSOR_FILE, VIDEO_FILE

_NAMES = (PREPROCESSOR_FILE, VIDEO_FILE, PROCESSOR_FILE, "chat_template.json")


def find_processor_folder(folder: Path, base: Path) -> Path:
    """Return the folder whose files describe the pictures: an adapter's own, or its base model's."""
    return folder if any((folder / name).is_file() for name in (PREPROCESSOR_FILE, PROCESSOR_FILE)) else base


def copy_processor_files(source: Path, folder: Path, rules: PictureRules | None = None) -> None:
    """Copy what `source` has of them into `folder`, where no file is replaced.

    Args:
        rules: sizes of pictures that the model was trained with, which whoever serves it should keep; None: those of
            the files.
    """
    for name in _NAMES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
            if rules is not None and name != "chat_template.json":
                _write_sizes(folder / name, rules)
    video = None if rules is None else rules.video
    if video is not None and not any((folder / name).is_file() for name in (VIDEO_FILE, PROCESSOR_FILE)):
        # transformers would read videos by the file of pictures
        (folder / VIDEO_FILE).write_text(json.dumps(video.describe_class(), indent=2) + "\n", encoding="utf-8")


def _write_sizes(file: Path, rules: PictureRules) -> None:
    tree = json_reader.read_json_file(file)
    parts = {"": (tree, rules.video if file.name == VIDEO_FILE else rules)}
    if file.name == PROCESSOR_FILE and isinstance(tree, dict):
        parts = {f"{kind}_processor": (tree.get(f"{kind}_processor"), own)
                 for kind, own in (("image", rules), ("video", rules.video))}  # fmt: skip
    old = copy.deepcopy(tree)
    for part, own in parts.values():
        if isinstance(part, dict) and own is not None:  # a processor may name its parts elsewhere
            part |= own.describe_sizes()
            named = ("min_pixels", "max_pixels", "fps", "max_frames")
            part |= {key: getattr(own, key) for key in named if key in part and hasattr(own, key)}
    if tree != old:
        file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
