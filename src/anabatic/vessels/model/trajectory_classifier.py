"""A trained classifier, ready to be asked: whole batches of words, packed without padding."""

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
from anabatic.data.sequence.word_tokenizer import WordEncoder
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.models import classifier
from anabatic.models.classifier import ClassifierDescription, compute_class_logits, pack_sequences
from anabatic.models.fused import installer
from anabatic.models.pretrained import resolve_model_folder
from anabatic.vessels.model import forest
from anabatic.vessels.model.daily_features import aggregate_by_day, number_days

ABSTAIN, UNKNOWN_CLASS = "ABSTAIN", "CLASS_UNKNOWN"
"""What stands for a class that is not named, in answers and in the words of the source's rows."""


@dataclass(frozen=True)
class ClassPrediction:
    """What a classifier says of one segment.

    Attributes:
        predicted_class: the likeliest label; None: it abstains.
        class_name: its name.
        confidence: its probability.
        probabilities: of all classes, in the order of their labels.
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
            "probabilities": [round(one, 6) for one in self.probabilities],
        }


class TrajectoryClassifier:
    """A classifier from its folder, or from the folder of the run that trained it.

    >>> classifier = TrajectoryClassifier("runs/classify")
    >>> classifier.predict("DT_NONE SPD_95 TURN_NONE MOVE_NONE POINT_END ...")["class_name"]

    Args:
        path: folder.
        device: where it runs; default: what is there.
        batch_tokens: words per forward pass.

    Raises:
        DataError: the folder holds no whole classifier.
    """

    def __init__(self, path: str | Path, device: DeviceConfig | None = None, batch_tokens: int = 16_384) -> None:
        folder = resolve_model_folder(path)
        self._device = select_device(device or DeviceConfig())
        self._model, self.description = classifier.load_classifier(folder, self._device.torch_device)
        installer.apply_fused_setting(self._model, "auto", self._device.type)
        self._segment_forest = forest.load_forest(folder) if self.description.trees_share else None
        self._vessel_forest = (
            forest.load_forest(folder, forest.VESSEL_FOREST_FILE) if self.description.vessel_share else None
        )
        self.folder = folder
        self._words = WordEncoder.from_tokenizer(tokenizers.load_tokenizer(folder))
        self._batch_tokens = max(batch_tokens, self.description.seq_len)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; the position is the label."""
        return self.description.classes

    def predict(self, text: str, features: Sequence[float] | None = None, abstain: float = 0.0) -> dict[str, Any]:
        """Return `predicted_class`, `class_name`, `confidence` and `probabilities` of one segment.

        Arguments and errors as for `predict_batch`.
        """
        return self.predict_batch([text], None if features is None else np.asarray([features]), abstain)[0]

    def predict_batch(
        self, texts: Sequence[str], features: np.ndarray | None = None, abstain: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return the same for each of `texts`.

        Args:
            texts: words, without class words.
            features: `[n, F]`, the numbers that `description.features` names; None: they are not known, the network
                alone is asked, and says so.
            abstain: least confidence for which a class is named.

        Raises:
            DataError: an empty text, most words unknown, numbers that are missing or too many.
        """
        return [self.make_prediction(row, abstain).as_json() for row in self.predict_probabilities(texts, features)]

    def make_prediction(self, probabilities: np.ndarray, abstain: float = 0.0) -> ClassPrediction:
        """Return what probabilities `[C]` say."""
        best = int(probabilities.argmax())
        sure = float(probabilities[best])
        named = sure >= abstain
        return ClassPrediction(
            best if named else None, self.class_names[best] if named else ABSTAIN, sure, probabilities.tolist()
        )

    def predict_by_passes(self, texts: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield the same, rows in their order at the end and none before; between two forward passes others can use
        the device.

        Raises:
            DataError: as for `predict_batch`.
        """
        samples = self._make_samples(texts, None)
        found = np.empty((len(samples), len(self.class_names)))
        for _ in self._run_passes(samples, found):
            yield []
        yield [self.make_prediction(row).as_json() for row in found]

    def predict_probabilities(self, texts: Sequence[str], features: np.ndarray | None = None) -> np.ndarray:
        """Return the probabilities of each of `texts`, fp64 `[n, C]`. Arguments and errors as for `predict_batch`."""
        samples = self._make_samples(texts, features)
        found = np.empty((len(samples), len(self.class_names)))
        for _ in self._run_passes(samples, found):
            pass
        return found if features is None else self._mix_segment_trees(found, samples)

    def _run_passes(self, samples: list[SequenceSegment], found: np.ndarray) -> Iterator[None]:
        """Fill the rows of `found`, some with each forward pass."""
        # Segments of like length lie in one batch: attention then pads nothing, and short ones need not wait.
        order = sorted(range(len(samples)), key=lambda number: -samples[number].num_inputs)
        start = 0
        while start < len(order):
            stop, room = start, self._batch_tokens
            while stop < len(order) and samples[order[stop]].num_inputs <= room:
                room -= samples[order[stop]].num_inputs
                stop += 1
            numbers = order[start:stop]
            found[numbers] = self._run_network([samples[number] for number in numbers])
            start = stop
            yield

    def mix_vessel_trees(
        self, found: np.ndarray, features: np.ndarray, vessels: Sequence[str], starts: Sequence[int | None]
    ) -> np.ndarray:
        """Return probabilities of segments with what the trees on their vessels say; as they are without such trees.

        Args:
            found: fp64 `[n, C]`.
            features: `[n, F]`, the numbers that `description.features` names, of all known segments of each vessel.
            vessels: whose segment each is.
            starts: unix seconds at which each begins; None: not known.
        """
        if self._vessel_forest is None or not len(found):
            return found
        groups = number_days(vessels, starts)
        told = self._vessel_forest.predict_probabilities(aggregate_by_day(features, groups))[groups]
        return forest.mix_geometric(found, told, self.description.vessel_share)

    def _mix_segment_trees(self, found: np.ndarray, samples: list[SequenceSegment]) -> np.ndarray:
        """Return the mean of what the network found and what the trees say."""
        if self._segment_forest is None or not samples:
            return found
        told = self._segment_forest.predict_probabilities(np.stack([sample.features for sample in samples]))  # type: ignore[misc]
        return forest.mix_probabilities(found, told, self.description.trees_share)

    @torch.inference_mode()
    def _run_network(self, samples: list[SequenceSegment]) -> np.ndarray:
        size = sum(sample.num_inputs for sample in samples)
        batch = collate_classification(samples, size, 0, self.description.seq_len)
        rows = pack_sequences(batch, self._device.torch_device, self.description.is_causal)
        with self._device.autocast():
            told = compute_class_logits(self._model, rows)
        found: np.ndarray = torch.softmax(told.double().cpu(), -1).numpy()
        return found

    def _make_samples(self, texts: Sequence[str], features: np.ndarray | None) -> list[SequenceSegment]:
        features = self._check_features(len(texts), features)
        texts = self._remove_class_words(texts)
        words = WordEncoder(self._words.vocab, self._words.unk_token_id)
        samples = []
        for number, text in enumerate(texts):
            ids = words(text)[: self.description.seq_len]
            if not len(ids):
                raise DataError(f"text {number + 1} of {len(texts)} has no words", "give the words of a segment")
            numbers = None if features is None else features[number]
            samples.append(SequenceSegment(ids, sequence_index=number, features=numbers))
        words.report_unknown_words("the segments")
        return samples

    def _remove_class_words(self, texts: Sequence[str]) -> list[str]:
        """Take class words out: they are what is asked for, and none was there in training."""
        answers = {*self.class_names, UNKNOWN_CLASS}
        plain = [[word for word in text.split() if word not in answers] for text in texts]
        taken = sum(len(text.split()) - len(words) for text, words in zip(texts, plain, strict=True))
        if taken:
            log.warn(f"{taken:,} class words are taken out of the text: they are the answer")
        return [" ".join(words) for words in plain]

    def _check_features(self, count: int, features: np.ndarray | None) -> np.ndarray | None:
        """Return the numbers as the head takes them; all unknown where none are given."""
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


def read_classifier_description(path: str | Path) -> ClassifierDescription:
    """Return what a classifier is, without loading it.

    Raises:
        DataError: the folder holds no classifier.
    """
    return classifier.read_description(resolve_model_folder(path))
