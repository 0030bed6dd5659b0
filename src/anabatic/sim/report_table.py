"""The table that `anabatic sim --report` prints at the end."""

from __future__ import annotations

from typing import Any

from anabatic.core.formatting import format_size

_MAX_ROWS = 8
"""Rows of a list; sim.json has all of them."""


def _format_summary(report: dict[str, Any]) -> list[str]:
    machine, step, devices = report["machine"], report["step"], report["devices"]
    copies = [
        sum(device[f"{way}_{what}"] for device in devices) for way in ("h2d", "d2h") for what in ("calls", "bytes")
    ]
    lines = [
        f"simulated {machine['npus']} x {machine['chip']}: {report['seconds']:.1f} s, exit code {report['exit_code']}",
        f"  peak HBM         {', '.join(format_size(device['hbm_peak']) for device in devices)}",
        f"  host to device   {copies[0]} copies, {format_size(copies[1])}",
        f"  device to host   {copies[2]} copies, {format_size(copies[3])}",
    ]
    if step["count"]:
        others = f", the longest of {step['launches']} launches" if step["launches"] > 1 else ""
        lines.append(
            f"  a step           {step['operators']:.0f} operators, {step['syncs']:.1f} synchronisations, "
            f"{step['collectives']:.1f} collectives of {format_size(step['collective_bytes'])} "
            f"(mean of {step['count']} steps{others})"
        )
    return lines


def _format_prediction(paper: dict[str, Any] | None) -> list[str]:
    if paper is None:
        return ["  estimated time  no step was seen: see `step` in the guide to `anabatic sim`"]
    scaling = paper["scaling"]
    lines = [
        f"  estimated time  {paper['step_ms']:.3f} ms a step, bound by the {paper['bound']}: "
        f"operators {paper['device_ms']:.3f} ms, "
        f"collectives {paper['collective_ms']:.3f} ms, MFU {100 * paper['mfu']:.1f} %"
    ]
    if scaling["devices"] > 1:
        lines.append(f"  scaling          {scaling['speedup']:.2f}x on {scaling['devices']} devices")
    return lines


def _format_list(title: str, rows: list[str]) -> list[str]:
    more = [f"    ... {len(rows) - _MAX_ROWS} more in the report"] if len(rows) > _MAX_ROWS else []
    return [f"  {title}", *(f"    {row}" for row in rows[:_MAX_ROWS]), *more] if rows else []


def render_table(report: dict[str, Any]) -> str:
    """Return the table."""
    lines = _format_summary(report) + _format_prediction(report["paper"])
    seen = bool(report["step"]["count"])

    def format_frequency(row: dict[str, Any], width: int = 9) -> str:
        return f"  {row['per_step']:>{width}.1f} a step" if seen else ""

    operators = [
        f"{row['name']:<44} {row['calls']:>9}{format_frequency(row)}  {row['paper_ms']:>10.3f} ms estimated"
        for row in report["operators"]
    ]
    lines += _format_list("operators", operators)
    collectives = [
        f"{row['name']:<44} {row['calls']:>9}{format_frequency(row)}  {format_size(row['bytes'])}"
        for row in report["collectives"]
    ]
    lines += _format_list("collectives", collectives)
    syncs = [
        f"{row['line']} ({row['call']})  {row['count']} times{format_frequency(row, 0)}" for row in report["syncs"]
    ]
    lines += _format_list("host synchronisations", syncs)
    unfused = [f"{row['name']}: {row['reason']}  {row['count']} times" for row in report["unfused"]]
    lines += _format_list("operators that fell out of their fused kernel", unfused)
    struck = [f"{row['fault']}: struck {row['struck']} times" for row in report["faults"]]
    return "\n".join(lines + _format_list("faults", struck)) + "\n"
