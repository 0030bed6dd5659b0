"""Each entry is found by its samples, and healthy logs find nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from anabatic.config.loading import yaml_reader
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, rendering
from anabatic.doctor.explain.log_scan import clean_line

HERE = Path(__file__).parent
SAMPLES: dict[str, list[str]] = yaml.safe_load((HERE / "explain_samples.yaml").read_text(encoding="utf-8"))
KNOWN = knowledge_base.load_knowledge()
HEALTHY = (HERE / "explain_healthy.txt").read_text(encoding="utf-8")


ASKED = {"slow", "hang", "memory-grows", "wrong-numbers", "killed"}
"""Words for troubles that leave no line in a log."""
NAMED = {"slow-start", "straggler", "slow-link", "silent-corruption"}
"""Words for troubles that the program itself names in a line."""
FOUND = [entry for entry in KNOWN.entries if not ASKED.intersection(entry.codes)]


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.id)
def test_entry_is_found(entry: knowledge_base.KnowledgeEntry) -> None:
    assert len(SAMPLES[entry.id]) >= max(1, len(entry.codes))
    for sample in SAMPLES[entry.id]:
        report = diagnosis.explain_text(f"step 1\n{sample}\nstep 2\n", KNOWN)
        assert report.first_cause is not None, sample
        assert report.first_cause.entry.id == entry.id, sample
        line = sample.splitlines()[report.first_cause.first_sighting.line - 2]
        assert clean_line(line.encode()) == report.first_cause.first_sighting.text
        for code in entry.codes:
            if code in sample and code not in rendering.SYMPTOMS:
                assert report.first_cause.code == code


def test_samples_belong_to_entries() -> None:
    assert set(SAMPLES) == {entry.id for entry in FOUND}


@pytest.mark.parametrize("word", rendering.SYMPTOMS)
def test_a_trouble_without_a_line_is_asked_for_by_its_word(word: str) -> None:
    first = diagnosis.explain_logs((word,), KNOWN).first_cause
    assert first is not None and word in first.entry.codes
    assert set(rendering.SYMPTOMS) == {*ASKED, *NAMED}


def test_healthy_logs_find_nothing() -> None:
    report = diagnosis.explain_text(HEALTHY, KNOWN)
    assert [(finding.entry.id, finding.first_sighting.text) for finding in report.findings] == []


def test_enough_is_known() -> None:
    assert len(KNOWN.entries) >= 150
    codes = [code for entry in KNOWN.entries for code in entry.codes]
    assert len(codes) == len(set(codes)), "a code belongs to one entry"
    assert len({entry.id for entry in KNOWN.entries}) == len(KNOWN.entries)


@pytest.mark.parametrize("entry", [*KNOWN.entries, *(entry for _, entry in KNOWN.prefixes)], ids=lambda entry: entry.id)
def test_both_languages_say_it(entry: knowledge_base.KnowledgeEntry) -> None:
    assert entry.source
    for language in knowledge_base.LANGUAGES:
        words = entry.explanations[language]
        for part in (words.meaning, words.cause, words.fix):
            assert part.endswith("." if language == "en" else "。"), part
            assert len(part) <= 420


@pytest.mark.parametrize("path", sorted(knowledge_base.KNOWLEDGE_FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_files_read_the_same_with_line_numbers(path: Path) -> None:
    assert yaml_reader.read_yaml(path).tree == yaml.safe_load(path.read_text(encoding="utf-8"))


_JUDGE_ALL = """
import sys, yaml
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, log_scan, matcher
patterns = matcher.LogMatcher(knowledge_base.load_knowledge())
for name, samples in yaml.safe_load(open(sys.argv[1], encoding="utf-8")).items():
    for sample in samples:
        report = diagnosis.rank_findings(log_scan.scan_text(sample, patterns))
        print(name, [(found.entry.id, found.code, found.role) for found in report.findings])
"""


@pytest.mark.process
def test_the_answer_does_not_depend_on_the_hash_seed() -> None:
    """Strings hash differently in every process: an answer that follows the order of a set changes with it."""
    answers = {
        subprocess.run(
            [sys.executable, "-c", _JUDGE_ALL, str(HERE / "explain_samples.yaml")],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(1, 5)
    }
    assert len(answers) == 1 and len(answers.pop().splitlines()) >= len(FOUND)
