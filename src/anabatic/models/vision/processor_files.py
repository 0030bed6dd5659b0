"""Files of a model folder that say how its pictures are read: kept beside the weights of what is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

_NAMES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json")


def copy_processor_files(source: Path, folder: Path) -> None:
    """Copy what `source` has of them into `folder`, where no file is replaced."""
    for name in _NAMES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
