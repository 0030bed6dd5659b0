"""Videos: frames, sizes, words and positions are those of transformers, and so are losses and gradients."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.video_utils import VideoMetadata

from anabatic.config.chat import Sampling
from anabatic.config.sections.train_jobs import PictureData, PictureSizes
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.packing import TokenSegment
from anabatic.data.shards.dataset_cache import build_dataset
from anabatic.data.shards.reader import ShardSet
from anabatic.data.vision.patches import make_clip_patches
from anabatic.data.vision.picture_batch import CollatePictures, list_pictures, make_positions, read_pictures
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules, VideoRules
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.data.vision.video_files import read_frames
from anabatic.infer.engine import Engine
from anabatic.models.forward import compute_summed_loss
from anabatic.models.pretrained import prepare_model
from anabatic.models.vision.picture_packing import make_picture_packing
from anabatic.models.vision.processor_files import copy_processor_files
from anabatic.models.vision.prompt_pictures import PromptPictures
from suite import tiny_vision

CPU = torch.device("cpu")
KINDS = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v", "glm46v": "Glm46V"}
FILES = {"qwen2_5_vl": "qwen2_vl"}
"""Folder of the video processor, where it is not that of the model."""
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "glm4v", "glm46v")


def read_rules(folder: Path, family: str, **bounds: Any) -> VideoRules:
    """Return the rules of videos of a folder without a file that describes them."""
    tiny_vision.save_seeing_model(folder, family, depth=1)
    (folder / "video_preprocessor_config.json").unlink()
    rules = read_picture_rules(folder, tiny_vision.make_config(family).to_dict(), **bounds).video
    assert rules is not None
    return rules


def find_function(family: str, name: str) -> Any:
    """Return a function of transformers' video processor from its source file: its class needs torchvision."""
    kind = FILES.get(family, family)
    file = Path(transformers.__file__).parent / "models" / kind / f"video_processing_{kind}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name)
    node.decorator_list, space = (
        [],
        {"np": np, "math": __import__("math"), "torch": torch, "VideoMetadata": VideoMetadata},
    )
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    node.returns = None
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(file), "exec"), space)
    return space[name]


@pytest.fixture(scope="module", params=KINDS)
def family_rules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, VideoRules]:
    rules = read_rules(tmp_path_factory.mktemp("kind"), request.param)
    assert rules.kind == KINDS[request.param]
    return request.param, rules


def test_sampled_frames_equal_transformers(family_rules: tuple[str, VideoRules]) -> None:
    family, rules = family_rules
    sample = find_function(family, "sample_frames")
    own = dict(
        fps=rules.fps, min_frames=rules.min_frames, max_frames=rules.max_frames, max_duration=300, num_frames=None,
        temporal_patch_size=2,
    )  # fmt: skip
    for total, rate in (
        (2, 30.0),
        (7, 2.0),
        (61, 29.97),
        (240, 24.0),
        (301, 25.0),
        (3000, 8.0),
        (20_000, 30.0),
        (90, 3.3),
    ):
        metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        expected = [int(at) for at in sample(SimpleNamespace(**own), metadata)]
        assert rules.sample_frames(total, rate) == expected, (total, rate)


def test_sizes_equal_transformers(family_rules: tuple[str, VideoRules]) -> None:
    family, rules = family_rules
    fit = find_function(family, "smart_resize")
    bounds = {"factor": rules.unit, "min_pixels": rules.min_pixels, "max_pixels": rules.max_pixels}
    for size in ((64, 48), (1080, 1920), (333, 77), (10, 500), (720, 1280)):
        for shown in (2, 5, 16, 301):
            over = {} if family == "qwen2_5_vl" else {"num_frames": shown, "temporal_factor": 2}
            expected = fit(height=size[0], width=size[1], **bounds, **over)
            found = rules.fit_frames(*size, shown)
            assert (found[0] * rules.patch, found[1] * rules.patch) == expected, (size, shown)


def test_defaults_are_those_of_the_class(family_rules: tuple[str, VideoRules]) -> None:
    family, rules = family_rules
    kind = FILES.get(family, family)
    file = Path(transformers.__file__).parent / "models" / kind / f"video_processing_{kind}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == f"{rules.kind}VideoProcessor")
    constants = transformers.image_utils.__dict__
    own: dict[str, Any] = {}
    for one in body.body:
        name = one.targets[0].id if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) else ""
        if name in ("size", "image_mean", "image_std", "patch_size", "min_frames", "max_frames", "fps", "max_duration"):
            assert isinstance(one, ast.Assign)
            own[name] = eval(ast.unparse(one.value), dict(constants))
    assert own["size"] == {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
    assert (tuple(own["image_mean"]), tuple(own["image_std"]), own["patch_size"]) == (
        rules.mean,
        rules.std,
        rules.patch,
    )
    for name in ("fps", "max_frames", "min_frames"):
        assert own.get(name, getattr(rules, name)) == getattr(rules, name)


@pytest.mark.parametrize("cap", [True, False])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_cap_on_frames_equals_transformers(tmp_path: Path, family: str, cap: bool) -> None:
    tiny_vision.save_seeing_model(tmp_path, family, depth=1)
    unit = 2 * tiny_vision.PATCH[family]
    size = {"shortest_edge": unit**2, "longest_edge": 999 * unit**2}
    values = {"size": size, "cap_pixels_per_frame": cap, "max_video_tokens": 40}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(values))
    rules = read_picture_rules(tmp_path, tiny_vision.make_config(family).to_dict()).video
    assert rules is not None
    for shown in (2, 8, 50):
        found: list[Any] = []
        owner = SimpleNamespace(max_video_tokens=40)
        space: dict[str, Any] = {"smart_resize": find_function(family, "smart_resize")}
        space["SizeDict"] = lambda kept=found, **sides: kept.append(sides)
        space["super"] = lambda: SimpleNamespace(resize=lambda **_: None)
        resize = find_function(family, "resize")
        resize.__globals__.update(space)
        video = torch.empty(1, shown, 3, 360, 640)
        bounds = SimpleNamespace(**size)
        resize(owner, video, size=bounds, resample=3, factor=unit, temporal_factor=2, cap_pixels_per_frame=cap)
        rows, columns = rules.fit_frames(360, 640, shown)
        assert found == [{"height": rows * rules.patch, "width": columns * rules.patch}]


@pytest.mark.parametrize("family", KINDS)
def test_words_equal_transformers(tmp_path: Path, family: str) -> None:
    rules = read_rules(tmp_path, family)
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    processor = next(
        value for name, value in vars(module).items() if name.endswith("Processor") and "Mixin" not in name
    )
    frame = {"glm4v": "<|image|>", "glm46v": "<|image|>"}.get(family, "<|video_pad|>")
    start, end = (
        ("<|begin_of_image|>", "<|end_of_image|>")
        if rules.kind[:3] == "Glm"
        else ("<|vision_start|>", "<|vision_end|>")
    )
    owner = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), image_token=frame, video_token=frame,
        vision_start_token=start, vision_end_token=end,
    )  # fmt: skip
    for name in ("_calculate_timestamps", "replace_frame_token_id"):
        if hasattr(processor, name):
            setattr(owner, name, getattr(processor, name).__get__(owner))
    frames, rate = [0, 7, 15, 22, 29, 29], 7.5
    metadata = VideoMetadata(total_num_frames=30, fps=rate, frames_indices=list(frames))
    inputs = {"video_grid_thw": torch.tensor([[3, 2, 2]]), "video_metadata": [metadata]}
    expected = processor.replace_video_token(owner, inputs, 0)
    found = rules.write_frames(frames, rate, (start, frame, end))
    assert found * (3 if family == "qwen2_5_vl" else 1) == expected


def draw_clip(folder: Path, name: str, frames: int, size: tuple[int, int]) -> list[str]:
    """Draw frames on which a square moves; return their paths."""
    paths = []
    for number in range(frames):
        image = Image.new("RGB", size, (20 * number, 60, 200))
        image.paste((250, 9, 9), (4 * number, 8, 4 * number + 16, 24))
        image.save(folder / f"{name}-{number}.png")
        paths.append(f"{name}-{number}.png")
    return paths


def cut_slowly(frames: list[np.ndarray], rules: VideoRules) -> tuple[Tensor, list[int]]:
    """Return patches in the order of transformers' `patchify`, value by value, and the grid."""
    frames = frames + frames[-1:] * (-len(frames) % 2)
    high, wide = (side // rules.patch for side in frames[0].shape[:2])
    patches = []
    for pair in range(0, len(frames), 2):
        for top in range(0, high, 2):
            for left in range(0, wide, 2):
                for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                    y, x = row * rules.patch, column * rules.patch
                    cut = np.stack([one[y : y + rules.patch, x : x + rules.patch] for one in frames[pair : pair + 2]])
                    scaled = (cut / np.float32(255) - np.float32(rules.mean)) / np.float32(rules.std)
                    patches.append(scaled.astype(np.float32).transpose(3, 0, 1, 2).reshape(-1))
    return torch.from_numpy(np.stack(patches)), [len(frames) // 2, high, wide]


def test_patches_equal_a_slow_reference(tmp_path: Path) -> None:
    rules = read_rules(tmp_path, "qwen3_vl")
    frames = [load_picture(str(tmp_path / path)) for path in draw_clip(tmp_path, "a", 4, (100, 50))]
    expected, grid = cut_slowly([np.asarray(one.resize((128, 64), resample=3)) for one in frames], rules)
    found = make_clip_patches(frames, rules, (grid[1], grid[2]))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_resizing_is_within_a_level_of_transformers(tmp_path: Path) -> None:
    """transformers resizes tensors of bytes, bicubic with antialiasing; Pillow rounds otherwise."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8)
    for size in ((64, 64), (256, 192)):
        found = np.asarray(Image.fromarray(pixels).resize(size, resample=3)).astype(int)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(tensor, (size[1], size[0]), mode="bicubic", antialias=True)
        assert np.abs(found - resized[0].permute(1, 2, 0).numpy().astype(int)).max() <= 1


def make_rows(folder: Path, family: str, fps: float = 2.0) -> tuple[PictureRules, list[TokenSegment]]:
    """Return rows of a file: with a video, two videos, a picture and a video, and text alone."""
    tiny_vision.save_seeing_model(folder / "model", family, depth=2)
    unit = 2 * tiny_vision.PATCH[family]
    first, second = draw_clip(folder, "a", 5, (2 * unit, unit)), draw_clip(folder, "b", 4, (unit, 2 * unit))
    tiny_vision.draw_shape(folder / "c.png", "red", "square", (2 * unit, 2 * unit))
    asked = [("<video>What?", [first], []), ("<video>or<video>?", [first, second], []), ("Say it.", [], [])]
    asked.append(("<video> and a text.", [second], []))
    asked += [] if family.startswith("glm") else [("<image> and <video>?", [second], ["c.png"])]  # not in transformers
    lines = []
    for text, videos, images in asked:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "It moves."}]
        lines.append(json.dumps({"messages": turns, "videos": videos, "images": images}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    bounds = {} if family == "glm46v" else {"fps": fps}
    rules = read_picture_rules(folder / "model", tiny_vision.make_config(family).to_dict(), **bounds)
    data = PictureData(valid_fraction=0.0, cache=str(folder / "cache"))
    shards = build_dataset(str(folder / "rows.jsonl"), folder / "model", data, "train", pictures=rules, seq_len=400)
    entries = [shards.locate_entry(number) for number in range(len(lines))]
    return rules, [shards.read_segment(entry, 0, entry.num_inputs) for entry in entries]


def make_inputs(row: TokenSegment, rules: PictureRules) -> dict[str, Any]:
    """Return transformers' arguments for a row."""
    assert rules.video is not None
    ids = torch.from_numpy(row.ids.astype(np.int64))[None]
    types = 2 * (ids == rules.video.image_token).int()
    if rules.image_token != rules.video.image_token:
        types += (ids == rules.image_token).int()
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": types}
    for kind in ("image", "video"):
        shown = [one for one in list_pictures(row.pictures or b"[]") if bool(one.frames) == (kind == "video")]
        if shown:
            frames = [list(read_frames(one.source, sorted(set(one.frames)))) for one in shown if one.frames]
            frames = frames or [[load_picture(one.source)] * 2 for one in shown]
            cut = [cut_slowly([np.asarray(image) for image in each], rules.video) for each in frames]
            inputs["pixel_values" + ("_videos" if kind == "video" else "")] = torch.cat([each[0] for each in cut])
            inputs[f"{kind}_grid_thw"] = torch.tensor([each[1] for each in cut])
    if rules.video.kind == "Qwen2VL" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = torch.tensor([2 / rules.video.fps] * len(inputs["video_grid_thw"]))
    return inputs


def collect_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.process  # seconds
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_videos_equal_transformers_one_by_one(tmp_path: Path, family: str) -> None:
    rules, rows = make_rows(tmp_path, family)
    plain = tiny_vision.build_model(family, torch.float64, depth=2).train()
    expected = torch.zeros((), dtype=torch.float64)
    for row in rows:
        inputs = make_inputs(row, rules)
        labels = torch.where(torch.from_numpy(row.loss_mask != 0), inputs["input_ids"][0], -100)
        logits = plain(use_cache=False, **inputs).logits[0, :-1].double()
        expected = expected + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
    expected.backward()

    model = prepare_model(tiny_vision.build_model(family, torch.float64, depth=2), CPU).train()
    batch = CollatePictures(rules)(rows, sum(row.num_inputs for row in rows) + 7, 0, 400)
    loss = compute_summed_loss(model, make_picture_packing(model)(batch, CPU), 1 << 20)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted, found = collect_gradients(plain), collect_gradients(model)
    assert wanted.keys() == found.keys()
    tolerance = 1e-3 if family.startswith("qwen3_5") else 1e-5  # the delta rule is computed in fp32
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    rules, rows = make_rows(tmp_path, family, fps=3.0)  # positions in time are then cut to whole ones
    model: Any = tiny_vision.build_model(family, depth=1).model
    for row in rows:
        inputs = make_inputs(row, rules)
        known = {key: value for key, value in inputs.items() if not key.startswith("pixel")}
        expected, _ = model.get_rope_index(**known)
        pictures = list_pictures(row.pictures or b"[]")
        np.testing.assert_array_equal(make_positions(row.ids, pictures, rules), expected[:, 0].numpy())


@pytest.mark.process  # seconds
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_answers_about_videos_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    rules, rows = make_rows(tmp_path, family)
    plain = tiny_vision.build_model(family, torch.float64, depth=2).eval()
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    engine = Engine(
        prepare_model(tiny_vision.build_model(family, torch.float64, depth=2), CPU).eval(),
        tiny_vision.build_tokenizer(), max_batch=3, max_len=400, step_tokens=23,
    )  # fmt: skip
    requests, expected = [], []
    for row in rows:
        inputs = make_inputs(row, rules)
        inputs = {key: value.double() if key.startswith("pixel") else value for key, value in inputs.items()}
        written = plain.generate(**inputs, attention_mask=torch.ones(1, len(row.ids)), generation_config=settings)
        expected.append(written[0, len(row.ids) :].tolist())
        ids, pictures = row.ids.astype(np.int64), list_pictures(row.pictures or b"[]")
        seen = PromptPictures(ids, rules.find_features(ids), read_pictures(ids, pictures, rules)) if pictures else None
        sampling = Sampling(temperature=0.0, max_new_tokens=6)
        requests.append(engine.request(ids.tolist(), sampling, stop_ids=(), pictures=seen))
    engine.submit(requests)
    while any(not request.finish_reason for request in requests):
        engine.step()
    assert [request.ids[: len(ids)] for request, ids in zip(requests, expected, strict=True)] == expected


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, frames, and a file of a video and broken ones where PyAV is there."""
    folder = tmp_path_factory.mktemp("place")
    tiny_vision.save_seeing_model(folder / "model", depth=1)
    draw_clip(folder, "f", 4, (64, 32))
    tiny_vision.draw_shape(folder / "c.png", "red", "square")
    (folder / "text.mp4").write_text("no video")
    (folder / "empty.mp4").touch()
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{folder / 'a.mp4'}\n#EXT-X-ENDLIST\n"
    (folder / "list.mp4").write_text(playlist)
    if importlib.util.find_spec("av"):
        import av

        for name in ("a.mp4", "a.mkv", "b.mp4"):
            with av.open(str(folder / name), "w", options={"movflags": "faststart"} if name == "b.mp4" else {}) as file:
                stream: Any = file.add_stream("mpeg4", rate=4)
                stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
                for number in range(12):
                    frame = av.VideoFrame.from_image(Image.new("RGB", (64, 32), (20 * number, 0, 0)))
                    file.mux(stream.encode(frame))
                file.mux(stream.encode())
        (folder / "torn.mp4").write_bytes((folder / "a.mp4").read_bytes()[:900])
        (folder / "behind.mp4").write_bytes((folder / "b.mp4").read_bytes()[:-400])
    return folder


def make_row(videos: Any, text: str = "<video>Which?", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "videos": videos, **more}


def build(place: Path, rows: list[dict[str, Any]], on_bad_row: str = "fail", family: str = "qwen3_vl") -> ShardSet:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = read_picture_rules(place / "model", tiny_vision.make_config(family).to_dict())
    data = PictureData(valid_fraction=0.0, cache=str(place / "cache"), on_bad_row=on_bad_row)
    return build_dataset(str(place / "rows.jsonl"), place / "model", data, "train", pictures=rules, seq_len=300)


FRAMES = [f"f-{number}.png" for number in range(4)]


def test_all_spellings_of_a_video_give_the_same_tokens(place: Path) -> None:
    answer = {"role": "assistant", "content": "red"}
    text = {"type": "text", "text": "Which?"}
    parts = ({"type": "video", "video": FRAMES}, {"type": "video_url", "video_url": {"url": FRAMES}}, {"type": "video"})
    rows = [make_row([FRAMES]), make_row([FRAMES], "Which?"), make_row(json.dumps([FRAMES])),
            make_row([[str(place / name) for name in FRAMES]])]  # fmt: skip
    for part in parts:
        turns = [{"role": "user", "content": [part, text]}, answer]
        rows.append({"messages": turns, "videos": [FRAMES] if len(part) == 1 else []})
    shards = build(place, rows)
    ids, mask = shards.read_entry(0)
    for number in range(1, len(rows)):
        assert np.array_equal(ids, shards.read_entry(number)[0])
    decoded = tiny_vision.build_tokenizer().decode(ids)
    frame = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    shown = f"user\n<|vision_start|><0.2 seconds>{frame}<1.2 seconds>{frame}<|vision_end|>Which?"
    assert shown in decoded and mask is not None and not mask[ids == 6].any()


def test_files_are_sampled_and_decoded(place: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    uri = f"data:video/mp4;base64,{base64.b64encode((place / 'a.mp4').read_bytes()).decode()}"
    shards = build(place, [make_row(["a.mp4"]), make_row("a.mkv"), make_row([uri]), make_row([FRAMES])])
    pieces = [shards.read_segment(entry := shards.locate_entry(n), 0, entry.num_inputs) for n in range(4)]
    first, other, third, _ = (list_pictures(piece.pictures)[0] for piece in pieces)
    assert list(first.frames) == [0, 2, 4, 7, 9, 11] and first.times == 3
    assert np.array_equal(pieces[0].ids, pieces[1].ids) and other.frames == first.frames == third.frames
    rules = read_picture_rules(place / "model", tiny_vision.make_config().to_dict())
    batch = CollatePictures(rules)(pieces, 2000, 0, 300)
    assert batch.pictures is not None
    red = [batch.pictures.pixels[8 * time : 8 * time + 8, : 2 * 256].mean().item() for time in range(3)]
    assert red == sorted(red) and red[2] - red[0] > 1.0


BAD = {
    "missing frame": (make_row([["f-0.png", "no.png"]]), "no.png: No such file"),
    "one frame": (make_row([["f-0.png"]]), "1 frames, 1 of them shown; 2 are needed"),
    "no frames": (make_row([[]]), "a video is an empty list of frames"),
    "other size": (make_row([["f-0.png", "c.png"]]), "c.png: a frame of 64 x 64 pixels, the first has 64 x 32"),
    "more tags": (make_row([FRAMES], "<video><video>"), "2 x <video> in the turns, 1 videos"),
    "no video": (make_row([], "<video>"), "1 x <video> in the turns, 0 videos"),
    "a picture's tag": (make_row([FRAMES], "<image>"), "1 x <image> in the turns, 0 pictures"),
    "own token": (make_row([FRAMES], "<video><|video_pad|>"), "3 tokens of pictures in the text, 2 pictures"),
    "address": (make_row(["https://a.example/b.mp4"]), "the video https://a.example/b.mp4 is an address in a network"),
    "number": (make_row([3]), "a video is a number"),
    "too many": (make_row([FRAMES * 200]), "800 frames are listed, 768 are shown at most"),
    "missing file": (make_row(["no.mp4"]), "no.mp4: No such file"),
    "folder": (make_row(["."]), "not a regular file"),
    "kind": (make_row(["data:image/png;base64,aaaa"]), "not data:video/TYPE;base64"),
    "text": (make_row(["text.mp4"]), "text.mp4: no video, or a torn one"),
    "empty": (make_row(["empty.mp4"]), "empty.mp4: no video, or a torn one"),
    "playlist": (make_row(["list.mp4"]), "list.mp4: no video, or a torn one"),
    "torn": (make_row(["torn.mp4"]), "torn.mp4: no (video, or a torn one|pictures in it)"),
    "torn behind": (make_row(["behind.mp4"]), "behind.mp4: (the video is torn: frame|no video, or a torn one)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_video_is_an_error_or_counted(place: Path, case: str) -> None:
    row, what = BAD[case]
    if isinstance(row["videos"][:1], list) and str(row["videos"][:1]).endswith((".mp4']", ".mkv']", "aaaa']", ".']")):
        pytest.importorskip("av", reason="PyAV is not installed")
    rows = [make_row([FRAMES]), row]
    with pytest.raises(DataError, match=f"rows.jsonl: line 2: .*{what}"):
        build(place, rows)
    shards = build(place, rows, "skip")
    assert shards.num_docs == 1 and shards.counts["bad"] + shards.counts["unread"] == 1


def test_models_whose_videos_are_not_known_refuse_them(tmp_path: Path) -> None:
    tiny_vision.save_seeing_model(tmp_path / "model", "internvl", depth=1)
    draw_clip(tmp_path, "f", 2, (32, 32))
    with pytest.raises(DataError, match="line 1: .* a video, and how the model's processor reads those is not known"):
        build(tmp_path, [make_row([["f-0.png", "f-1.png"]])], family="internvl")


def test_settings_stand_in_place_of_the_file(tmp_path: Path) -> None:
    rules = read_rules(tmp_path, "qwen3_vl", fps=4, max_frames=9, video_max_pixels=200_000)
    assert (rules.fps, rules.max_frames, rules.max_pixels) == (4, 9, 200_000)
    assert len(rules.sample_frames(500, 25.0)) == 9
    config = tiny_vision.make_config("glm46v").to_dict()
    tiny_vision.save_seeing_model(tmp_path / "glm", "glm46v", depth=1)
    with pytest.raises(ConfigError, match="vision.fps is given, and Glm46V chooses frames"):
        read_picture_rules(tmp_path / "glm", config, fps=1)
    with pytest.raises(ConfigError, match="vision.fps is 0"):
        PictureSizes(fps=0)
    with pytest.raises(ConfigError, match="vision.max_frames is 0"):
        PictureSizes(max_frames=0)


def test_saved_models_keep_how_videos_were_shown(tmp_path: Path) -> None:
    source = tiny_vision.save_seeing_model(tmp_path / "model", depth=1)
    config = tiny_vision.make_config().to_dict()
    (source / "video_preprocessor_config.json").unlink()
    rules = read_picture_rules(source, config, fps=1, video_max_pixels=300_000)
    for folder in (source, tmp_path / "first", tmp_path / "second"):
        folder.mkdir(exist_ok=True)
        if folder != source:
            copy_processor_files(source, folder, rules)
            assert read_picture_rules(folder, config).video == rules.video
