"""Faults that are injected into a run on purpose: `lockstep train quickstart --fault
kernel_noise,std=0.01`, or `with injected(KernelNoise(std=0.01)): train(config)`.

A fault is in the sampler, in the trainer, in the rows between them, or in the engine as a server.
The run goes on and measures what a user with that defect would see. `testing.dumps` makes rows
with the same faults, without a run.

No torch is imported here, so that the command line can read the settings.
"""
# ruff: noqa: F401  the names of all faults, for `from lockstep.testing.faults import ...`

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
from lockstep.testing.faults.noise import GrowingNoise
from lockstep.testing.faults.rows import (
    ClampedLogprobs,
    DroppedFinalTokens,
    DroppedSeparators,
    DroppedThinking,
    DuplicatedPrompt,
    FillerLogprobs,
    InjectedControlTokens,
    NonfiniteLogprobs,
    PaddedRows,
    PostProcessedReplies,
    ProbabilitiesAsLogprobs,
    QuantisedLogprobs,
    RerenderedHistory,
    RetokenizedRows,
    ShiftedLogprobs,
    TokensAfterStop,
    TrainedObservations,
    WrongBoundary,
)
from lockstep.testing.faults.samplers import (
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
