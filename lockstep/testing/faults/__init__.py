"""Faults to inject into a run on purpose, by one override: `fault=kernel_noise fault.std=0.01`.

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
    Learn,
    LogProbs,
    RowShare,
    Subject,
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
    token_match,
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
    "FillerLogprobs",
    "GrowingNoise",
    "HalfLoadedWeights",
    "IgnoredSinks",
    "IgnoredWindow",
    "InjectedControlTokens",
    "KernelNoise",
    "Learn",
    "LogProbs",
    "LostReplies",
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
    "Subject",
    "TokensAfterStop",
    "TrainedObservations",
    "UnmergedAdapter",
    "WrongBoundary",
    "WrongWeights",
    "retokenized",
    "shifted",
    "token_match",
    "without_early_routes",
    "without_final",
]
