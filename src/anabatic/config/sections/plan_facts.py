"""Facts of one command that decide its memory and time, beyond the sections that all trainings share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanFacts:
    """Facts of a training that its plan needs and the command's settings decide (`LoopJob.get_plan_facts`).

    Attributes:
        indivisible_tokens: tokens that one micro-batch holds together; 0: a segment.
        targets: share of the tokens whose loss is computed.
        has_lm_head: the model has a head over its vocabulary.
        has_reference: a second copy of the first weights is kept.
        vocabulary: words of a new model that follow from its rows, an assumption; None: those of its tokenizer.
        step_rows: rows of a step, each as long as a segment, where `batch.global_batch_tokens` is left open; None: the
            plan assumes a number of segments.
    """

    indivisible_tokens: int = 0
    targets: float = 1.0
    has_lm_head: bool = True
    has_reference: bool = False
    vocabulary: int | None = None
    step_rows: int | None = None
