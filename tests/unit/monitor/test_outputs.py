"""JSON, CSV, a log that can be played again, and the names that Grafana boards of npu-exporter ask for."""

from __future__ import annotations

import csv
import io
import json
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.core.json_reader import JsonlWriter, replace_nonfinite
from anabatic.monitor import exporter, output_formats
from anabatic.monitor.sampler import Frame
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot, parse_snapshot_row
from anabatic.monitor.sources import npu_smi_command
from unit.monitor import fake
from unit.monitor.test_screen import snapshots


def test_a_json_row_has_null_for_what_is_not_known() -> None:
    row = output_formats.frame_to_row(
        Frame(1, Snapshot("npu-smi", [DeviceReading(5)])), Snapshot("npu-smi", [DeviceReading(5)])
    )
    (device,) = json.loads(json.dumps(row))["devices"]
    assert device["npu_id"] == 5 and device["util_pct"] is None and device["hbm_used_mb"] is None
    assert (row["error"], row["age_s"] >= 0) == (None, True)


def test_csv_has_a_line_per_device_and_empty_cells() -> None:
    snapshot = npu_smi_command.parse_snapshot(fake.table(4))
    rows = list(csv.DictReader(io.StringIO(output_formats.format_csv(snapshot, heading=True))))
    assert [(row["npu_id"], row["chip_id"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert [row["power_w"] for row in rows] == ["160.5", "", "160.5", ""]
    assert (rows[1]["used_mb"], rows[1]["pids"]) == ("3001", "4000001")
    assert output_formats.format_csv(snapshot, heading=False).count("\n") == 4


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(snapshots)
def test_what_is_logged_is_played_again(tmp_path: Path, snapshot: Snapshot) -> None:
    again = parse_snapshot_row(
        json.loads(json.dumps(replace_nonfinite(output_formats.frame_to_log_row(Frame(1, snapshot)))))
    )
    assert again == snapshot


def test_a_log_keeps_failed_readings(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = JsonlWriter(path)
    good = Snapshot("npu-smi", [DeviceReading(0, util_pct=7.0)], taken_at=1000.0)
    for frame in (Frame(1, good, now=1000.0), Frame(2, good, "it hangs", "wait", now=1003.0)):
        writer.write(output_formats.frame_to_log_row(frame))
    writer.close()
    with open(path, "a", encoding="utf-8") as file:
        file.write(
            'garbage\n{"source": 5}\n[1]\n{"source": "npu-smi", "taken_at": 1004, "devices": [{"npu_id": "x"}]}\n{"so'
        )
    first, second, third = output_formats.read_recording(path)
    assert (first.problem, first.get_age()) == ("", 0.0)
    assert (second.problem, second.get_age(), second.snapshot.devices[0].util_pct) == ("it hangs", 3.0, 7.0)
    assert third.snapshot.devices == []


def test_what_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        next(output_formats.read_recording(tmp_path / "absent"))
    (tmp_path / "empty").write_text("hello\n", encoding="utf-8")
    with pytest.raises(DataError, match="no reading"):
        next(output_formats.read_recording(tmp_path / "empty"))


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.integers()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["source", "taken_at", "devices", "npu_id", "processes", "pid"]), inner),
        ),
    )
)
def test_no_row_of_a_log_raises(value: object) -> None:
    if not isinstance(value, dict):
        return
    found = parse_snapshot_row(value)
    assert (found is None) or (found.source == value["source"] and len(found.devices) <= len(value["devices"]))


def _series(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in parser.text_string_to_metric_families(text)
    }


def test_prometheus_finds_the_names_and_labels_of_npu_exporter() -> None:
    snapshot = npu_smi_command.parse_snapshot(fake.table(4))
    snapshot.devices[1].health, snapshot.devices[1].error_codes = 'Al"arm\\', [5, 6]
    snapshot.devices[2].temp_c = None
    series = _series(output_formats.format_prometheus(Frame(1, snapshot), {"step": 12.0}))
    labels, power = series["npu_chip_info_power"][0]
    assert labels == {
        "id": "0",
        "model_name": "910",
        "vdie_id": "",
        "pcie_bus_info": "0000:00:00.0",
        "namespace": "",
        "pod_name": "",
        "container_name": "",
    }
    assert power == 160.5 and len(series["npu_chip_info_power"]) == 2  # a second die has none: absent, not 0
    assert [labels["id"] for labels, _ in series["npu_chip_info_temperature"]] == ["0", "1", "3"]
    assert [value for _, value in series["npu_chip_info_health_status"]] == [1, 0, 1, 1]
    assert [value for _, value in series["npu_chip_info_hbm_used_memory"]] == [3000, 3001, 3002, 3003]
    assert series["npu_chip_info_error_code"] == [
        (series["npu_chip_info_power"][0][0] | {"id": "1", "pcie_bus_info": "0000:01:00.0"}, 5.0)
    ]
    assert "npu_chip_info_total_memory" not in series  # no DDR
    assert series["npu_chip_info_process_info"][1][0]["process_id"] == "4000001"
    assert series["machine_npu_nums"] == [({}, 4.0)] and series["anabatic_run_step"] == [({}, 12.0)]


def test_prometheus_finds_gpus_under_the_names_of_dcgm_exporter() -> None:
    gpu = DeviceReading(
        1, kind="gpu", name="H200", uuid="GPU-1", util_pct=50, mem_used_mb=100, mem_total_mb=1000, power_w=300.0
    )
    series = _series(
        output_formats.format_prometheus(Frame(1, Snapshot("nvml", [gpu], [DeviceProcess(1, None, 5)])), {})
    )
    labels, free = series["DCGM_FI_DEV_FB_FREE"][0]
    assert free == 900 and (labels["gpu"], labels["UUID"], labels["modelName"]) == ("1", "GPU-1", "H200")
    assert "DCGM_FI_DEV_GPU_TEMP" not in series and "machine_npu_nums" not in series


def test_the_server_answers_and_a_taken_port_is_an_error() -> None:
    with exporter.serve_metrics(("127.0.0.1", 0), lambda: "figure 1\n") as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.read() == b"figure 1\n" and answer.headers["Content-Type"].startswith(
                "text/plain; version=0.0.4"
            )
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=5)
        missing.value.close()
        with (
            pytest.raises(Failure, match=f"cannot listen on 127.0.0.1:{port}"),
            exporter.serve_metrics(("127.0.0.1", port), str),
        ):
            pass
