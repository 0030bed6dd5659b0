"""Files of a model folder that say how its pictures are read: kept beside the weights of what is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from anabatic.core import json_reader
from anabatic.data.vision.picture_rules import PREPROCESSOR_FILE, PROCESSOR_FILE, PictureRules

_NAMES = (PREPROCESSOR_FILE, "video_preprocessor_config.json", PROCESSOR_FILE, "chat_template.json")


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
            if rules is not None and name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
                _write_sizes(folder / name, rules)


def _write_sizes(file: Path, rules: PictureRules) -> None:
    tree = json_reader.read_json_file(file)
    part = tree.get("image_processor") if file.name == PROCESSOR_FILE else tree
    if not isinstance(part, dict):  # of a processor that names its parts elsewhere: none
        return
    old = dict(part)
    part |= rules.describe_sizes()
    part |= {key: getattr(rules, key) for key in ("min_pixels", "max_pixels") if key in part}
    if part == old:
        return
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
