"""Inference with a trained classifier: batches of words, packed without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data.sequence.dataset import SequenceSegment, collate_classification
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.models import fused_ops
from anabatic.models.classifier import compute_class_logits, pack_sequences
from anabatic.models.pretrained import resolve_model_folder
from anabatic_vessels.io import classifier_folder
from anabatic_vessels.io.description import TrajectoryDescription
from anabatic_vessels.model import forest
from anabatic_vessels.model.baselines import aggregate_by_day, number_days
from anabatic_vessels.words.word_tokenizer import WordEncoder

ABSTAIN, UNKNOWN_CLASS = "ABSTAIN", "CLASS_UNKNOWN"
"""Placeholders for a missing class: in predictions, and in the words of the source's rows."""


@dataclass(frozen=True)
class ClassPrediction:
    """The prediction for one segment.

    Attributes:
        predicted_class: the most probable label; None: the classifier abstains.
        class_name: name of the class.
        confidence: probability of the most probable label.
        probabilities: probabilities of all classes, in the order of their labels.
    """

    predicted_class: int | None
    class_name: str
    confidence: float
    probabilities: list[float]

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the "token_for_nj" inference scripts."""
        return {
            "predicted_class": self.predicted_class,
            "class_name": self.class_name,
            "confidence": round(self.confidence, 6),
            "probabilities": [round(probability, 6) for probability in self.probabilities],
        }


class TrajectoryClassifier:
    """A classifier loaded from its folder, or from the folder of the run that trained it.

    >>> classifier = TrajectoryClassifier("runs/classify")
    >>> classifier.predict("DT_NONE SPD_95 TURN_NONE MOVE_NONE POINT_END ...")["class_name"]

    Args:
        path: folder.
        device: device settings; default: the available device.
        batch_tokens: words per forward pass.

    Raises:
        DataError: the folder contains no complete classifier.
    """

    def __init__(self, path: str | Path, device: DeviceConfig | None = None, batch_tokens: int = 16_384) -> None:
        folder = resolve_model_folder(path)
        self._device = select_device(device or DeviceConfig())
        self._model, self.description = classifier_folder.load_classifier(
            folder, self._device.torch_device, TrajectoryDescription
        )
        fused_ops.apply_fused_setting(self._model, "auto", self._device.type)
        self._segment_forest = forest.load_forest(folder) if self.description.trees_share else None
        self._vessel_forest = (
            forest.load_forest(folder, forest.VESSEL_FOREST_FILE) if self.description.vessel_share else None
        )
        self.folder = folder
        self._encoder = WordEncoder.from_tokenizer(tokenizers.load_tokenizer(folder))
        self._batch_tokens = max(batch_tokens, self.description.seq_len)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; the index is the label."""
        return self.description.classes

    def predict(self, text: str, features: Sequence[float] | None = None, abstain: float = 0.0) -> dict[str, Any]:
        """Return `predicted_class`, `class_name`, `confidence` and `probabilities` of one segment.

        Arguments and errors as for `predict_batch`.
        """
        return self.predict_batch([text], None if features is None else np.asarray([features]), abstain)[0]

    def predict_batch(
        self, texts: Sequence[str], features: np.ndarray | None = None, abstain: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return the prediction of each of `texts`, as `predict` does.

        Args:
            texts: words, without class words.
            features: `[n, F]`, the features named in `description.features`; None: unknown, only the network is used,
                with a warning.
            abstain: minimum confidence for naming a class.

        Raises:
            DataError: a text is empty, most words are unknown, or the number of features is wrong.
        """
        return [self.make_prediction(row, abstain).as_json() for row in self.predict_probabilities(texts, features)]

    def make_prediction(self, probabilities: np.ndarray, abstain: float = 0.0) -> ClassPrediction:
        """Return the prediction for probabilities `[C]`."""
        best = int(probabilities.argmax())
        confidence = float(probabilities[best])
        is_confident = confidence >= abstain
        return ClassPrediction(
            best if is_confident else None,
            self.class_names[best] if is_confident else ABSTAIN,
            confidence,
            probabilities.tolist(),
        )

    def predict_by_passes(self, texts: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield after each forward pass, so that others can use the device: empty lists, at the end all predictions.

        Raises:
            DataError: as for `predict_batch`.
        """
        samples = self._make_samples(texts, None)
        probabilities = np.empty((len(samples), len(self.class_names)))
        for _ in self._run_passes(samples, probabilities):
            yield []
        yield [self.make_prediction(row).as_json() for row in probabilities]

    def predict_probabilities(self, texts: Sequence[str], features: np.ndarray | None = None) -> np.ndarray:
        """Return the probabilities of each of `texts`, fp64 `[n, C]`. Arguments and errors as for `predict_batch`."""
        samples = self._make_samples(texts, features)
        probabilities = np.empty((len(samples), len(self.class_names)))
        for _ in self._run_passes(samples, probabilities):
            pass
        return probabilities if features is None else self._mix_segment_trees(probabilities, samples)

    def _run_passes(self, samples: list[SequenceSegment], probabilities: np.ndarray) -> Iterator[None]:
        """Fill the rows of `probabilities`, a batch per forward pass."""
        # Segments of similar length share a batch, which keeps the padding in attention small.
        order = sorted(range(len(samples)), key=lambda index: -samples[index].num_inputs)
        start = 0
        while start < len(order):
            stop, budget = start, self._batch_tokens
            while stop < len(order) and samples[order[stop]].num_inputs <= budget:
                budget -= samples[order[stop]].num_inputs
                stop += 1
            indices = order[start:stop]
            probabilities[indices] = self._run_network([samples[index] for index in indices])
            start = stop
            yield

    def mix_vessel_trees(
        self, probabilities: np.ndarray, features: np.ndarray, vessels: Sequence[str], starts: Sequence[int | None]
    ) -> np.ndarray:
        """Mix the probabilities of segments with those of the trees on their vessels, if there are such trees.

        Args:
            probabilities: fp64 `[n, C]`.
            features: `[n, F]`, the features named in `description.features`, of all known segments of each vessel.
            vessels: vessel of each segment.
            starts: start of each segment in unix seconds; None: unknown.
        """
        if self._vessel_forest is None or not len(probabilities):
            return probabilities
        groups = number_days(vessels, starts)
        tree_probabilities = self._vessel_forest.predict_probabilities(aggregate_by_day(features, groups))[groups]
        return forest.mix_geometric(probabilities, tree_probabilities, self.description.vessel_share)

    def _mix_segment_trees(self, probabilities: np.ndarray, samples: list[SequenceSegment]) -> np.ndarray:
        """Return the mean of the probabilities of the network and of the trees."""
        if self._segment_forest is None or not samples:
            return probabilities
        features = np.stack([sample.features for sample in samples])  # type: ignore[misc]
        tree_probabilities = self._segment_forest.predict_probabilities(features)
        return forest.mix_probabilities(probabilities, tree_probabilities, self.description.trees_share)

    @torch.inference_mode()
    def _run_network(self, samples: list[SequenceSegment]) -> np.ndarray:
        num_tokens = sum(sample.num_inputs for sample in samples)
        batch = collate_classification(samples, num_tokens, 0, self.description.seq_len)
        rows = pack_sequences(batch, self._device.torch_device, self.description.is_causal)
        with self._device.autocast():
            logits = compute_class_logits(self._model, rows)
        probabilities: np.ndarray = torch.softmax(logits.double().cpu(), -1).numpy()
        return probabilities

    def _make_samples(self, texts: Sequence[str], features: np.ndarray | None) -> list[SequenceSegment]:
        features = self._check_features(len(texts), features)
        texts = self._remove_class_words(texts)
        encoder = WordEncoder(self._encoder.vocab, self._encoder.unk_token_id)
        samples = []
        for index, text in enumerate(texts):
            ids = encoder(text)[: self.description.seq_len]
            if not len(ids):
                raise DataError(f"text {index + 1} of {len(texts)} has no words", "give the words of a segment")
            row_features = None if features is None else features[index]
            samples.append(SequenceSegment(ids, sequence_index=index, features=row_features))
        encoder.report_unknown_words("the segments")
        return samples

    def _remove_class_words(self, texts: Sequence[str]) -> list[str]:
        """Remove class words: they are the answer, and training had none."""
        class_words = {*self.class_names, UNKNOWN_CLASS}
        cleaned = [[word for word in text.split() if word not in class_words] for text in texts]
        num_removed = sum(len(text.split()) - len(words) for text, words in zip(texts, cleaned, strict=True))
        if num_removed:
            log.warn(f"{num_removed:,} class words are taken out of the text: they are the answer")
        return [" ".join(words) for words in cleaned]

    def _check_features(self, count: int, features: np.ndarray | None) -> np.ndarray | None:
        """Return the features as fp32; NaN if none are given."""
        names = self.description.features
        if not names:
            return None
        if features is None:
            if not self.description.features_hidden:
                raise DataError(
                    f"the classifier reads {len(names)} numbers of each segment beside its words; none are given",
                    "classify rows or AIS files with `anabatic classify predict`, or train with head.features_hidden",
                )
            log.warn(f"words alone: the {len(names)} numbers that the classifier also reads are not given")
            return np.full((count, len(names)), np.nan, dtype=np.float32)
        if features.shape != (count, len(names)):
            raise DataError(
                f"numbers of shape {list(features.shape)} for {count} segments of {len(names)} numbers each",
                f"give {names[0]}, ... in the order of description.features",
            )
        return features.astype(np.float32)
