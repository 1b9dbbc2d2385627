"""Settings of on-policy distillation. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config import ABOVE_0, Checked, at_least, did_you_mean, tag
from lockstep.engines.config import ServedConfig
from lockstep.errors import ConfigError
from lockstep.objectives.config import KLOrder

TeacherSignal = Literal["sampled", "top_k", "full"]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One teacher: a model that scores the ids that the student sampled."""

    model: str = ""
    """Model of the teacher, named as `model` is; or RUN@STEP, or RUN for its best checkpoint, else
    its last: name a step if that run may go on. Its tokenizer must give every id of the student's
    the same bytes."""
    engine: ServedConfig | None = None
    """Server that runs the teacher: engine=sglang with engine.urls=URL. Of `model` only config and
    tokenizer are read then. none loads the model into the training process."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Checked):
    """On-policy distillation: the student samples, a teacher scores every sampled token."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher of every task that `by_source` does not name."""
    by_source: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Teachers for parts of a mixture: distill.by_source.NAME.model=DIR for task.parts.NAME."""
    signal: TeacherSignal = "sampled"
    """The teacher's answer about a token. sampled: the log-prob of its id, which gives the token an
    advantage: log teacher - log student, a one-sample estimate of the reverse KL (Lu et al. 2025).
    top_k: the teacher's most likely ids and the mass of all others, whose KL is a loss. full: the
    whole distribution, whose KL is a loss; for teachers in the training process."""
    top_k: Annotated[int, at_least(1)] = 64
    """Ids of the teacher's per token, with signal=top_k."""
    divergence: KLOrder = "reverse"
    """KL of signal=top_k and full. reverse: KL(student || teacher), which avoids what the teacher
    would not say. forward: KL(teacher || student), which covers everything that it would."""
    coef: Annotated[float, ABOVE_0] = 1.0
    """Coefficient of the teacher's advantage or loss."""
    reward_coef: Annotated[float, at_least(0)] = 0.0
    """Factor on the advantages from rewards. 0 learns from the teacher alone; the reward is then
    only reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teachers:
            raise ConfigError(
                "distill has no teacher. Name one with distill.teacher.model=DIR (a shipped model, "
                "a checkpoint directory, or a run), or distill.by_source.NAME.model=DIR."
            )
        for setting, teacher in self.teachers.items():
            if not teacher.model:
                raise ConfigError(f"{setting}.model is empty: it names the teacher's model.")
            if teacher.engine is None:
                continue
            if self.signal != "sampled":
                raise ConfigError(
                    f"distill.signal={self.signal} with {setting}.engine="
                    f"{tag(type(teacher.engine))}: a server scores given ids only. "
                    f"Set distill.signal=sampled, or leave {setting}.engine out."
                )
            if not teacher.engine.urls:
                raise ConfigError(
                    f"{setting}.engine={tag(type(teacher.engine))} needs a server that is up: "
                    f"{setting}.engine.urls=http://HOST:PORT."
                )

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """Setting -> teacher; the teacher of all other tasks is first, where there is one."""
        out = {f"distill.by_source.{name}": each for name, each in self.by_source.items()}
        if self.teacher != TeacherConfig():
            out = {"distill.teacher": self.teacher, **out}
        return out

    @property
    def is_served(self) -> bool:
        """True if a server runs any of them."""
        return any(teacher.engine is not None for teacher in self.teachers.values())

    def setting_of(self, source: str) -> str:
        """The setting of the teacher of a task from this source."""
        return f"distill.by_source.{source}" if source in self.by_source else "distill.teacher"

    def check_sources(self, sources: Mapping[str, object]) -> None:
        """Raises ConfigError if a part of the mixture has no teacher, or a teacher no part.
        sources: the parts; empty where the task is no mixture."""
        for name in self.by_source:
            if name not in sources:
                hint = did_you_mean(name, sources) or " The task is no mixture of parts."
                raise ConfigError(f"distill.by_source.{name} is a teacher of no task.{hint}")
        left = [name for name in sources if name not in self.by_source] if sources else [""]
        if left and self.teacher == TeacherConfig():
            raise ConfigError(
                f"tasks of {', '.join(left) or 'this run'} have no teacher. Name one for all with "
                "distill.teacher.model=DIR."
            )
