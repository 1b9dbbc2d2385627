"""Faults that are injected into a run on purpose: `lockstep train quickstart --fault
kernel_noise,std=0.01`, or `with injected(KernelNoise(std=0.01)): train(config)`.

A fault of the engine makes the sampler differ from the trainer, and leaves the trainer as it is; a
fault of the trainer does the reverse. A fault of the rows leaves both sides as they are, and gets
wrong what is written down between them. Each way the run goes on, and what it measures is what a
user with that defect would see. `testing.dumps` makes rows of the same faults, without a run.

No torch here: the settings are read by the command line. What computes is in `faulty_engines.py`,
`faulty_decoders.py` and `models/variants.py`.
"""

from lockstep.testing.faults.base import (
    FILLER,
    FaultConfig,
    Faults,
    Learn,
    RowShare,
    injected,
    parse_fault,
    split_faults,
)
from lockstep.testing.faults.decoders import (
    ActiveDropout,
    DetachedSinks,
    IgnoredSinks,
    IgnoredWindow,
    ScoredAfterUpdate,
)
from lockstep.testing.faults.edits import (
    retokenized,
    shifted,
    without_early_routes,
    without_final,
)
from lockstep.testing.faults.rows import (
    DroppedFinalTokens,
    DroppedSeparators,
    DroppedThinking,
    DuplicatedPrompt,
    InjectedControlTokens,
    PaddedRows,
    PostProcessedReplies,
    RerenderedHistory,
    RetokenizedRows,
    TokensAfterStop,
    TrainedObservations,
    WrongBoundary,
)
from lockstep.testing.faults.samplers import (
    GrowingNoise,
    KernelNoise,
    LostRoutes,
    ProcessedLogprobs,
    RouterNoise,
    SamplingNoise,
    StaleWeights,
    UnmergedAdapter,
)
from lockstep.testing.faults.servers import (
    DuplicatedReplies,
    EngineFrozen,
    EngineKilled,
    FalseVersions,
    HalfLoadedWeights,
    LostReplies,
    MisorderedReplies,
    SlowReplies,
    WrongWeights,
)
from lockstep.testing.faults.values import (
    ClampedLogprobs,
    FillerLogprobs,
    NonfiniteLogprobs,
    ProbabilitiesAsLogprobs,
    QuantisedLogprobs,
    ShiftedLogprobs,
)

__all__ = [
    "FILLER",
    "ActiveDropout",
    "ClampedLogprobs",
    "DetachedSinks",
    "DroppedFinalTokens",
    "DroppedSeparators",
    "DroppedThinking",
    "DuplicatedPrompt",
    "DuplicatedReplies",
    "EngineFrozen",
    "EngineKilled",
    "FalseVersions",
    "FaultConfig",
    "Faults",
    "FillerLogprobs",
    "GrowingNoise",
    "HalfLoadedWeights",
    "IgnoredSinks",
    "IgnoredWindow",
    "InjectedControlTokens",
    "KernelNoise",
    "Learn",
    "LostReplies",
    "LostRoutes",
    "MisorderedReplies",
    "NonfiniteLogprobs",
    "PaddedRows",
    "PostProcessedReplies",
    "ProbabilitiesAsLogprobs",
    "ProcessedLogprobs",
    "QuantisedLogprobs",
    "RerenderedHistory",
    "RetokenizedRows",
    "RouterNoise",
    "RowShare",
    "SamplingNoise",
    "ScoredAfterUpdate",
    "ShiftedLogprobs",
    "SlowReplies",
    "StaleWeights",
    "TokensAfterStop",
    "TrainedObservations",
    "UnmergedAdapter",
    "WrongBoundary",
    "WrongWeights",
    "injected",
    "parse_fault",
    "retokenized",
    "shifted",
    "split_faults",
    "without_early_routes",
    "without_final",
]
