"""The classifier's head: what it pools, how it scales numbers, and that it is saved whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anabatic.core.errors import DataError
from anabatic.data.sequence.dataset import SequenceSegment, collate_classification
from anabatic.models import classifier
from anabatic.models.classifier import (
    SCALED_LIMIT,
    ClassHead,
    ClassifierDescription,
    FeatureEncoder,
    compute_class_logits,
    get_class_head,
    pack_sequences,
)
from anabatic_testing.tiny_models import build_tiny_model
from anabatic_vessels.io import classifier_folder
from anabatic_vessels.words import word_tokenizer

CPU = torch.device("cpu")
WORDS = [f"W_{n}" for n in range(40)]
ROWS = [np.asarray(row, np.int32) for row in ([5, 6, 7, 8], [5, 9, 10], [11] * 9, [5, 6, 7, 9])]


def made(**options: object) -> tuple[torch.nn.Module, ClassifierDescription]:
    description = ClassifierDescription(classes=("a", "b", "c"), words="motion-v1-r10", **options)  # type: ignore[arg-type]
    model = build_tiny_model(43)
    classifier.attach_class_head(model, description)
    get_class_head(model).to_empty(device=CPU)
    features = torch.randn(50, len(description.features)) if description.features else None
    get_class_head(model).init_weights(3, features)
    return model.eval(), description


def asked(
    model: torch.nn.Module, description: ClassifierDescription, rows: list[np.ndarray], tail: int = 7
) -> torch.Tensor:
    numbers = np.linspace(0, 1, len(description.features)).astype(np.float32) if description.features else None
    samples = [SequenceSegment(row, sequence_index=n, features=numbers) for n, row in enumerate(rows)]
    batch = collate_classification(samples, sum(map(len, rows)) + tail, 0, 64)
    with torch.no_grad():
        return compute_class_logits(model, pack_sequences(batch, CPU, description.is_causal))  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["both", "causal"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_rows_with_the_same_first_word_differ_and_do_not_mix(pooling: str, attention: str) -> None:
    model, description = made(pooling=pooling, attention=attention)
    together = asked(model, description, ROWS)
    assert (together[0] - together[1]).abs().max() > 1e-4 and (together[0] - together[3]).abs().max() > 1e-4
    alone = torch.cat([asked(model, description, [row], tail=0) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_is_what_it_says(pooling: str) -> None:
    description = ClassifierDescription(classes=("a", "b"), words="x", pooling=pooling)  # type: ignore[arg-type]
    head = ClassHead(8, description)
    samples = [SequenceSegment(np.arange(n, dtype=np.int32), sequence_index=n) for n in (3, 1, 5)]
    rows = pack_sequences(collate_classification(samples, 12, 0, 8), CPU, causal=False)
    states = torch.randn(12, 8)
    parts = states[:9].split([3, 1, 5])
    wanted = torch.stack([part.mean(0) if pooling == "mean" else part[-1] for part in parts])
    torch.testing.assert_close(head.pool_states(states, rows), wanted)


def test_numbers_are_scaled_by_their_quantiles() -> None:
    head = ClassHead(4, ClassifierDescription(classes=("a", "b"), words="x", features=("f", "g", "h")))
    values = torch.stack((torch.randn(500) * 90, torch.full((500,), 3.0), torch.randint(0, 3, (500,)).float()), dim=1)
    values[::7, 0] = float("nan")
    head.init_weights(0, values)
    assert isinstance(head.numbers, FeatureEncoder)
    scaled = head.numbers.scale_features(values.nan_to_num(0.0))
    known = values[:, 0][~values[:, 0].isnan()]
    table = np.nanquantile(values[:, 0].numpy().astype(np.float64), np.linspace(0, 1, 33))
    wanted = np.interp(known.numpy(), table, np.linspace(-SCALED_LIMIT, SCALED_LIMIT, 33))
    np.testing.assert_allclose(scaled[:, 0][~values[:, 0].isnan()].numpy(), wanted, atol=1e-3)
    assert scaled[:, 1].abs().max() == 0  # always the same: in the middle
    assert scaled.abs().max() <= SCALED_LIMIT + 1e-6 and len(scaled[:, 2].unique()) == 3
    away = head.numbers.scale_features(torch.tensor([[1e9, 3.0, -4.0]]))
    assert away[0, 0] == pytest.approx(SCALED_LIMIT) and away[0, 2] == pytest.approx(-SCALED_LIMIT)
    with torch.no_grad():
        assert head.numbers(torch.full((2, 3), float("nan"))).isfinite().all()


def test_saved_and_read_again(tmp_path: Path) -> None:
    model, description = made(features=("f", "g"), pooling="mean")
    before = asked(model, description, ROWS)
    classifier_folder.save_classifier(
        model, tmp_path / "m", word_tokenizer.build_word_tokenizer(WORDS), description, {"split.json": "{}\n"}
    )  # type: ignore[arg-type]
    again, told = classifier_folder.load_classifier(tmp_path / "m", CPU, ClassifierDescription)
    assert told == description and (tmp_path / "m" / "split.json").read_text() == "{}\n"
    torch.testing.assert_close(asked(again, told, ROWS), before, rtol=1e-5, atol=1e-6)

    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")  # the body is a model like any other
    assert plain.config.vocab_size == 43

    (tmp_path / "m" / classifier_folder.HEAD_WEIGHTS_FILE).write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        classifier_folder.load_classifier(tmp_path / "m", CPU, ClassifierDescription)
    (tmp_path / "m" / classifier.DESCRIPTION_FILE).unlink()
    with pytest.raises(DataError, match="it is no classifier"):
        classifier_folder.load_classifier(tmp_path / "m", CPU, ClassifierDescription)
