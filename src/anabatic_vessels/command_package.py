"""List what this package adds to the program (entry-point group `anabatic.commands`)."""

from __future__ import annotations

from pathlib import Path

from anabatic.config.loading.command_package import (
    MODEL_FILES,
    TRAIN,
    TRAIN_ALIASES,
    Command,
    CommandEntry,
    CommandPackage,
    ShippedRecipe,
)

_PRECHECK = "anabatic_vessels.commands.prechecks:check_vessel_files"
_RECIPES = Path(__file__).resolve().parent / "recipes"

_COMMANDS = (
    Command(
        "classify words",
        "anabatic_vessels.config.tracks:ClassifyWordsJob",
        "anabatic_vessels.commands.write_words:run",
        "Turn AIS files into rows of words.",
        option_aliases={"out": "-o"},
        positional_setting="inputs",
        precheck=_PRECHECK,
    ),
    Command(
        "classify pretrain",
        "anabatic_vessels.config.train:ClassifyPretrainJob",
        "anabatic_vessels.commands.pretrain_words:run",
        "Train a model on words of vessel trajectories, before it learns classes.",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases={**TRAIN_ALIASES, "model.depth": "--depth"},
        precheck=_PRECHECK,
    ),
    Command(
        "classify train",
        "anabatic_vessels.config.train:ClassifyTrainJob",
        "anabatic_vessels.commands.train_classifier:run",
        "Train a classifier of vessel trajectories.",
        is_training=True,
        output_files=("best_model/classifier.json", "final_model/classifier.json"),
        option_aliases={**TRAIN_ALIASES, "model.depth": "--depth"},
        precheck=_PRECHECK,
    ),
    Command(
        "classify predict",
        "anabatic_vessels.config.predict:ClassifyPredictJob",
        "anabatic_vessels.commands.predict_classes:run",
        "Predict the classes of segments and vessels.",
        option_aliases={"model": "-m", "out": "-o", "inputs": "--data"},
        positional_setting="inputs",
        precheck=_PRECHECK,
    ),
    Command(
        "classify eval",
        "anabatic_vessels.config.evaluation:ClassifyEvalJob",
        "anabatic_vessels.commands.evaluate_classifier:run",
        "Score a classifier per segment and per vessel, compared with baselines.",
        output_files=("eval.json",),
        option_aliases={"model": "-m"},
        precheck=_PRECHECK,
    ),
    Command(
        "classify map",
        "anabatic_vessels.config.draw_map:ClassifyMapJob",
        "anabatic_vessels.commands.draw_map:run",
        "Draw vessels on a map, coloured by their class, errors marked.",
        option_aliases={"out": "-o"},
        positional_setting="inputs",
        precheck=_PRECHECK,
    ),
)

_ENTRIES = (
    CommandEntry("classify", "Classify vessel trajectories.", TRAIN),
    CommandEntry("classify words", example="ais/ -o words.jsonl"),
    CommandEntry("classify pretrain", example="--data words.jsonl --out runs/vessel-words"),
    CommandEntry("classify train", example="--data words.jsonl --out runs/vessel"),
    CommandEntry("classify predict", example="others.csv -m runs/vessel -o predictions.jsonl"),
    CommandEntry("classify eval", example="-m runs/vessel --data others.csv"),
    CommandEntry("classify map", example="predictions.jsonl ais.csv -o map.html"),
)

PACKAGE = CommandPackage(
    commands=_COMMANDS,
    entries=_ENTRIES,
    recipes=(
        ShippedRecipe(
            "vessel", "run", "classify vessels: words, pretraining, classifier, score, map", "any", folder=_RECIPES
        ),
        ShippedRecipe(
            "vessel-8npu",
            "classify train",
            "the vessel classifier on Qwen2.5-0.5B",
            "8 x Ascend 910B3 (64 GB)",
            folder=_RECIPES,
        ),
    ),
    served_classifier="anabatic_vessels.model.trajectory_classifier:TrajectoryClassifier",
)
