"""torch_npu's operators of detection equal slow formulas in float64."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim


def test_operators_of_detection(sim: Sim) -> None:
    told = json.loads(sim.program("vision.py"))
    assert told["wrong"] == {}
    assert told["checked"] > 25
    assert "only support trans==True" in told["refused"]["giou corners"]
    assert "need the same number of boxes" in told["refused"]["diou sizes"]
    assert "npu_rotated_box_encode with weight is not simulated" in told["refused"]["rotated weight"]
    assert "outside of the feature map" in told["refused"]["flags outside"]
    assert "npu_batch_nms with change_coordinate_frame is not simulated" in told["refused"]["batch_nms frame"]
    assert "npu_roi_align with roi_end_mode 1 is not simulated" in told["refused"]["roi_end_mode"]
    assert "must be an image in [0, 2)" in told["refused"]["roi image"]
