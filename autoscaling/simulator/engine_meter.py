"""What a modelled engine counts between two looks, and the step model it learns. It must not change the engine."""

from __future__ import annotations

from autoscaling.simulator.engine_job import EngineWindow
from autoscaling.simulator.engine_steps import Gaps
from autoscaling.simulator.spec import StepLaw
from policies.measures import DepthUse
from policies.step_model import StepModel
from policies.types import StepCoefficients

SAMPLES_OF_LAW = 1_000
"""Steps that the coefficients of an engine that does not learn claim to rest on."""


class Meter:
    """Counts of one window; fields are raised by the engine."""

    __slots__ = (
        "_gaps", "_law", "_model", "aborted", "busy_ns", "finished", "hit_tokens", "preemptions", "prefill_tokens",
        "query_tokens", "steps", "written_tokens",
    )  # fmt: skip

    def __init__(self, law: StepLaw, learn: bool, prior: StepCoefficients | None) -> None:
        self._law = law
        self._model = StepModel(prior or law.coefficients()) if learn else None
        self._gaps = Gaps()
        self._clear()

    @property
    def learns(self) -> bool:
        """Whether :meth:`observe` does anything."""
        return self._model is not None

    def _clear(self) -> None:
        self.prefill_tokens = self.written_tokens = self.query_tokens = self.hit_tokens = 0
        self.preemptions = self.steps = self.busy_ns = self.finished = self.aborted = 0

    def add(self, first_ns: int, growth_ns: int, steps: int, total_ns: int, decoding: int, prefill_tokens: int) -> None:
        """``steps`` like steps ended, with ``decoding`` jobs that wrote a token in each."""
        self.steps += steps
        self.busy_ns += total_ns
        self.prefill_tokens += steps * prefill_tokens
        if decoding:
            self.written_tokens += decoding * steps
            self._gaps.add(first_ns, growth_ns, steps, decoding, total_ns)

    def observe(self, running: int, kv_tokens: float, prefill_tokens: int, step_ns: float) -> None:
        """Learn from steps of ``step_ns`` on average: one observation for a run of like steps."""
        if self._model is not None:
            self._model.observe(running, kv_tokens, prefill_tokens, step_ns / 1e6)

    def step_model(self) -> StepCoefficients:
        """The step model as learned, or the law's linear part."""
        if self._model is not None:
            return self._model.coefficients()
        law = self._law
        return StepCoefficients(law.a_ms, law.b_ms, law.c_ms, law.d_ms, SAMPLES_OF_LAW, law.jitter_share)

    def take(self, depth_use: tuple[DepthUse, ...], draft_tokens: int, accepted_tokens: int) -> EngineWindow:
        """Close the window, with what the drafts did in it, and open the next."""
        gaps = self._gaps.take()
        window = EngineWindow(
            self.prefill_tokens, self.written_tokens, self.query_tokens, self.hit_tokens, self.preemptions, self.steps,
            self.busy_ns / 1e6, gaps.live(), gaps, self.finished, self.aborted, self.step_model(),
            depth_use, draft_tokens, accepted_tokens,
        )  # fmt: skip
        self._clear()
        return window
