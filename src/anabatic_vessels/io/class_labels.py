"""Map the values of class and ship type columns to one list of class names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean, parse_whole
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.words.vocabulary import SOURCE_CLASSES

CHINESE_CLASSES = {
    "散货船": "Bulk_Carrier",
    "货船": "Cargo_Ship",
    "集装箱船": "Container_Ship",
    "驳船": "Barge",
    "渔船": "Fishing_Vessel",
    "其他": "Other",
    "其它": "Other",
    "油轮": "Oil_Tanker",
    "油船": "Oil_Tanker",
    "客船": "Passenger_Ship",
    "运沙船": "Sand_Carrier",
    "运砂船": "Sand_Carrier",
    "渔业科考船": "Fishery_Research_Vessel",
    "补给船": "Supply_Ship",
    "供应船": "Supply_Ship",
    "储罐船": "Storage_Tanker",
    "潜艇": "Submarine",
    "运输船": "Transport_Ship",
}
"""Chinese names of the source project's classes; other files of its author use them."""
DANISH_SHIP_TYPES = {
    "cargo": "Cargo",
    "tanker": "Tanker",
    "fishing": "Fishing",
    "passenger": "Passenger",
    "pleasure": "Pleasure_Craft",
    "sailing": "Sailing",
    "tug": "Tug_Tow",
    "towing": "Tug_Tow",
    "towing_long/wide": "Tug_Tow",
    **dict.fromkeys(("hsc", "wig", "pilot", "sar", "dredging", "diving", "military", "law_enforcement"), "Other"),
    **dict.fromkeys(("port_tender", "anti-pollution", "medical", "other", "spare_1", "spare_2"), "Other"),
    **dict.fromkeys(("high_speed_craft", "special_craft", "dive", "search_and_rescue"), "Other"),
}
"""`Ship type` of the Danish Maritime Authority's files, in lower case, with `_` for a space."""
NO_TYPE_WORDS = (
    "undefined",
    "unknown",
    "unspecified",
    "reserved",
    "not_party_to_conflict",
    "not_available",
    "nan",
    "none",
)


def classify_ship_type(code: int) -> str:
    """Return the class of an AIS ship type (ITU-R M.1371-5, table 53); empty: none.

    The groups are those of MarineCadastre's list of vessel types.
    """
    if code in (31, 32, 52):
        return "Tug_Tow"
    single = {30: "Fishing", 36: "Sailing", 37: "Pleasure_Craft"}.get(code)
    tens = {6: "Passenger", 7: "Cargo", 8: "Tanker"}.get(code // 10)
    return single or tens or ("Other" if 20 <= code <= 99 else "")


def resolve_classes(
    texts: Mapping[str, str], settings: TrackSettings, bad_rows: BadRowPolicy
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the class names and the class of each text; empty: none.

    Args:
        texts: `label:TEXT` from a class column or `type:TEXT` from a ship type column -> file and line.
        settings: settings, which may list the classes.
        bad_rows: policy for classes outside the list.

    Raises:
        DataError: a class is not in the list, and bad rows are not skipped.
    """
    configured = tuple(settings.classes)
    class_by_text = {text: _class_name(text, configured, settings.class_map) for text in texts if text}
    names = {name for name in class_by_text.values() if name}
    classes = configured or (SOURCE_CLASSES if names <= set(SOURCE_CLASSES) else tuple(sorted(names)))
    for text, name in class_by_text.items():
        if name and name not in classes:
            value = text.partition(":")[2]
            bad_rows.report_row(
                f'{texts[text]}: class "{value}" is none of the {len(classes)} classes.{did_you_mean(value, classes)}',
                f"classes: {', '.join(classes)}; map it with --tracks.class-map '{value}=NAME'",
                "classes outside the list",
            )
            class_by_text[text] = ""
    return classes, class_by_text


def parse_whole_number(text: str) -> int | None:
    """Return a text such as `4` or `4.0` as an int, or None."""
    head, _, tail = text.partition(".")
    return None if tail.strip("0") else parse_whole(head)


def _class_name(text: str, configured: tuple[str, ...], class_map: dict[str, str]) -> str:
    column, _, value = text.partition(":")
    value = "_".join(value.split()) if value not in configured and value not in class_map else value
    code = parse_whole_number(value)
    if (mapped := class_map.get(value, class_map.get(str(code)))) is not None:
        return mapped
    if code is not None:
        classes = configured or SOURCE_CLASSES
        if column == "type":
            return classify_ship_type(code)
        return classes[code] if code < len(classes) else value
    if value in configured or value.lower() in NO_TYPE_WORDS:
        return "" if value not in configured else value
    if column == "type":
        return _class_of_type(value)
    return CHINESE_CLASSES.get(value, value)


def _class_of_type(name: str) -> str:
    """Return the class of a ship type that is a name: Danish, Chinese, or one that begins with such a word."""
    if name in SOURCE_CLASSES or name in CHINESE_CLASSES:
        return CHINESE_CLASSES.get(name, name)
    known = DANISH_SHIP_TYPES | {text.lower(): text for text in DANISH_SHIP_TYPES.values()}
    return known.get(name.lower()) or known.get(re.split(r"[^a-z]", name.lower(), maxsplit=1)[0], name)


def require_known_label(label: int, classes: tuple[str, ...], location: str) -> None:
    """Check that a label is within the classes.

    Raises:
        DataError: it is not; names the location.
    """
    if not 0 <= label < len(classes):
        raise DataError(
            f"{location}: label {label}, but there are {len(classes)} classes (0 to {len(classes) - 1})",
            "name the classes in the order of their labels: --tracks.classes NAME NAME ...",
        )
