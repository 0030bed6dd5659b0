"""Objects in the pictures of a row, as ms-swift's `objects` names them: what they are called, and where they are.

`<ref-object>` and `<bbox>` in the turns stand for `ref` and `bbox` in their order (ms-swift,
docs/source_en/Customization/Custom-dataset.md, section Grounding).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.chat.turn_fields import BadRowError, json_type_name
from anabatic.data.readers.document import Message
from anabatic.data.vision.picture_files import MAX_SOURCE_PIXELS

if TYPE_CHECKING:
    from anabatic.data.vision.picture_rules import PictureRules

OBJECTS_COLUMN, OBJECTS = "objects", "objects:"
"""Column of a row, and how the source begins that keeps it behind the row's pictures."""
REF_TAG, BOX_TAG = "<ref-object>", "<bbox>"
_TAGS = re.compile(f"{REF_TAG}|{BOX_TAG}")
_WORDS = {
    "tokens": ("<|object_ref_start|>{}<|object_ref_end|>", "<|box_start|>{points}<|box_end|>"),
    "plain": ("{}", "{values}"),
    "GLM": ("{}", "<|begin_of_box|>[{values}]<|end_of_box|>"),
    "InternVL": ("<ref>{}</ref>", "<box>[{values}]</box>"),
}
"""Form -> what stands for an object's name and for its box: Qwen-VL's with tokens, which is ms-swift's default, and
without (QWENVL_BBOX_FORMAT=new); that of GLM-V's model cards; that of InternVL's format of chats."""


def take_objects(value: Any, num_pictures: int) -> tuple[str, ...]:
    """Return the source of the objects of a row; of a row without, nothing.

    Raises:
        BadRowError: a field of `objects` is not what ms-swift describes.
    """
    value = _parse_json(value)
    if value in (None, "", {}, []):
        return ()
    if not isinstance(value, Mapping):
        raise BadRowError(f'"{OBJECTS_COLUMN}" is {json_type_name(value)}, not an object')
    refs, boxes = (list(_read_list(value, key)) for key in ("ref", "bbox"))
    kind = value.get("bbox_type") or "real"
    owners = list(_read_list(value, "image_id")) or [0] * len(boxes)
    if kind not in ("real", "norm1"):
        raise BadRowError(f'bbox_type is {str(kind)[:40]!r}, not "real" or "norm1"')
    if any(not isinstance(ref, str) for ref in refs):
        raise BadRowError("ref is not a list of texts")
    if len(owners) != len(boxes):
        raise BadRowError(f"{len(owners)} x image_id, {len(boxes)} boxes in bbox")
    if wrong := [one for one in owners if type(one) is not int or not 0 <= one < num_pictures]:
        raise BadRowError(f"image_id is {wrong[0]}, and the row has {num_pictures} pictures, counted from 0")
    most = 1.0 if kind == "norm1" else float(MAX_SOURCE_PIXELS)
    for box in boxes:
        if not _is_box(box, most):
            raise BadRowError(f"bbox has {str(box)[:80]}, not [x1, y1, x2, y2] or [x, y] as bbox_type {kind} has them")
    fields = {"ref": refs, "bbox": [list(box) for box in boxes], "bbox_type": kind, "image_id": owners}
    return (OBJECTS + json.dumps(fields),)


def _parse_json(value: Any) -> Any:
    """Return what a text spells in JSON, as tables have it, else `value`."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json_reader.loads(value)
    except ValueError as error:
        raise BadRowError(f'"{OBJECTS_COLUMN}" is not JSON ({error})') from error


def _read_list(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = value.get(key)
    if found is not None and not isinstance(found, (list, tuple)):
        raise BadRowError(f'"{key}" of "{OBJECTS_COLUMN}" is {json_type_name(found)}, not a list')
    return found or ()


def _is_box(box: Any, most: float) -> bool:
    """Return whether these are two or four coordinates, of which the last two are not before the first."""
    if not isinstance(box, (list, tuple)) or len(box) not in (2, 4):
        return False
    if not all(type(one) in (int, float) and 0 <= one <= most for one in box):
        return False
    return bool(box[0] <= box[-2] and box[1] <= box[-1])


def split_objects(pictures: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Return the pictures and videos of a row, and its objects."""
    shown = tuple(one for one in pictures if not one.startswith(OBJECTS))
    found = [one for one in pictures if one.startswith(OBJECTS)]
    return shown, dict(json_reader.loads(found[0].removeprefix(OBJECTS))) if found else None


def place_objects(
    turns: Sequence[Message],
    objects: Mapping[str, Any] | None,
    name: str,
    sizes: Sequence[tuple[int, int]] = (),
    rules: PictureRules | None = None,
) -> list[Message]:
    """Return turns with names and boxes in place of tags.

    Args:
        sizes: of the row's pictures, width and height.
        rules: how the model wants boxes; None: the tags are counted, and no more.

    Raises:
        DataError: there are more tags than objects, or fewer; a box is outside of its picture, or how the model's boxes
            are written is not known here.
    """
    if objects is None:
        return list(turns)
    text = "".join(str(turn.get("content") or "") for turn in turns)
    for tag, key in ((REF_TAG, "ref"), (BOX_TAG, "bbox")):
        if text.count(tag) != len(objects[key]):
            what = (
                f'{name}: {text.count(tag)} x {tag} in the turns, {len(objects[key])} entries in "{key}" of "objects"'
            )
            raise DataError(what, f"write {tag} once for each of them")
    if rules is None:
        return list(turns)
    if rules.box_form not in _WORDS:
        raise DataError(
            f"{name}: objects, and how the model's boxes are written is not known here", "leave the row out"
        )
    ref, box = _WORDS[rules.box_form]
    names = iter([ref.replace("{}", one) for one in objects["ref"]])
    places = zip(objects["bbox"], objects["image_id"], strict=True)
    scaled = (_scale_box(one, objects["bbox_type"], sizes[owner], rules, name) for one, owner in places)
    boxes = iter([_write_box(box, one) for one in scaled])
    return [
        {**turn, "content": _TAGS.sub(lambda match: next(names if match[0] == REF_TAG else boxes), turn["content"])}
        if _TAGS.search(turn.get("content") or "")
        else turn
        for turn in turns
    ]


def _scale_box(box: Sequence[float], kind: str, size: tuple[int, int], rules: PictureRules, name: str) -> list[int]:
    """Return coordinates as the model has them: thousandths of the sides, or pixels of the resized picture."""
    sides = [size[at % 2] if kind == "real" else 1.0 for at in range(len(box))]
    if any(value > side for value, side in zip(box, sides, strict=True)):
        what = f"{name}: the box {list(box)} is outside of its picture of {size[0]} x {size[1]} pixels"
        raise DataError(what, "write coordinates of the picture as its file has it, or bbox_type norm1")
    rows, columns = rules.fit_grid(size[1], size[0])
    whole = (1000, 1000) if rules.boxes_are_thousandths else (columns * rules.patch, rows * rules.patch)
    return [round(value / side * whole[at % 2]) for at, (value, side) in enumerate(zip(box, sides, strict=True))]


def _write_box(words: str, box: Sequence[int]) -> str:
    points = ",".join(f"({box[at]},{box[at + 1]})" for at in range(0, len(box), 2))
    between = "," if words == _WORDS["GLM"][1] else ", "
    return words.format(points=points, values=f"[{between.join(map(str, box))}]")
