"""Pseudo-gradients of many workers: compressed, checked, and merged through a bucket."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_extra_module
from millrace.gradients.scoring.settings import ScorerOptions, ScorerSettings
from millrace.gradients.settings import (
    AggregationSettings,
    AggregatorSettings,
    InitialWeights,
    RegistrationSettings,
    RunOptions,
    RunSettings,
)
from millrace.gradients.templar.settings import (
    TemplarImportSettings,
    TemplarOptions,
    TemplarSource,
)
from millrace.schemas.chain import ChainLink, ChainStart, ExcludedWorker, OuterKind, OuterOptimizer
from millrace.schemas.gradient import Codec, ExclusionReason, GradientHeader, Support, Transform
from millrace.schemas.merge import MergeRule, MergeSettings
from millrace.schemas.scores import ScoreFormula, ScoringRules, WindowScores
from millrace.schemas.window import GatherSettings, WindowOptions

if TYPE_CHECKING:
    from millrace.gradients.codec.compress import (
        Decoder,
        ErrorFeedback,
        GradientEncoder,
        decode,
        encode,
    )
    from millrace.gradients.codec.gradient_object import (
        CheckedGradient,
        ExpectedGradient,
        GradientError,
        check_gradient,
        encode_gradient,
        read_gradient,
    )
    from millrace.gradients.codec.merged_chunks import MergedChunks
    from millrace.gradients.codec.shared_indices import Mask
    from millrace.gradients.codec.tensors import CodeError
    from millrace.gradients.gather_window import GatherWindow, Sender
    from millrace.gradients.merging.links import (
        ChainError,
        catch_up,
        commit_first_link,
        find_newest_window,
        iterate_kept_links,
        iterate_links,
        read_link,
    )
    from millrace.gradients.merging.merge import (
        WorkerFactors,
        compute_worker_factors,
        merge,
    )
    from millrace.gradients.scoring.evaluation import ComputeLoss
    from millrace.gradients.scoring.loss_function import load_compute_loss
    from millrace.gradients.scoring.scorer import iterate_scores, score_run
    from millrace.gradients.state import WeightState, copy_state
    from millrace.gradients.sync.aggregator import aggregate_run, ensure_run_begun
    from millrace.gradients.sync.gather import gather
    from millrace.gradients.sync.gather_results import GatherOutcome, QuorumError
    from millrace.gradients.sync.model_tensors import select_weights
    from millrace.gradients.sync.participant import Participant, TrainingWindow
    from millrace.gradients.sync.registrations import read_newest_roster
    from millrace.gradients.sync.templar_import import import_templar_run
    from millrace.gradients.sync.window_merge import ChainStep, merge_window
    from millrace.gradients.sync.windows import merge_windows
    from millrace.gradients.sync.worker_key import WorkerKey
    from millrace.gradients.weights import (
        begin_run,
        check_weights,
        load_checkpoint_state,
        load_newest_state,
    )

__all__ = [
    "AggregationSettings",
    "AggregatorSettings",
    "ChainError",
    "ChainLink",
    "ChainStart",
    "ChainStep",
    "CheckedGradient",
    "CodeError",
    "Codec",
    "ComputeLoss",
    "Decoder",
    "ErrorFeedback",
    "ExcludedWorker",
    "ExclusionReason",
    "ExpectedGradient",
    "GatherOutcome",
    "GatherSettings",
    "GatherWindow",
    "GradientEncoder",
    "GradientError",
    "GradientHeader",
    "InitialWeights",
    "Mask",
    "MergeRule",
    "MergeSettings",
    "MergedChunks",
    "OuterKind",
    "OuterOptimizer",
    "Participant",
    "QuorumError",
    "RegistrationSettings",
    "RunOptions",
    "RunSettings",
    "ScoreFormula",
    "ScorerOptions",
    "ScorerSettings",
    "ScoringRules",
    "Sender",
    "Support",
    "TemplarImportSettings",
    "TemplarOptions",
    "TemplarSource",
    "TrainingWindow",
    "Transform",
    "WeightState",
    "WindowOptions",
    "WindowScores",
    "WorkerFactors",
    "WorkerKey",
    "aggregate_run",
    "begin_run",
    "catch_up",
    "check_gradient",
    "check_weights",
    "commit_first_link",
    "compute_worker_factors",
    "copy_state",
    "decode",
    "encode",
    "encode_gradient",
    "ensure_run_begun",
    "find_newest_window",
    "gather",
    "import_templar_run",
    "iterate_kept_links",
    "iterate_links",
    "iterate_scores",
    "load_checkpoint_state",
    "load_compute_loss",
    "load_newest_state",
    "merge",
    "merge_window",
    "merge_windows",
    "read_gradient",
    "read_link",
    "read_newest_roster",
    "score_run",
    "select_weights",
]

_MODULES = {
    "ChainError": "merging.links",
    "CodeError": "codec.tensors",
    "Decoder": "codec.compress",
    "GradientEncoder": "codec.compress",
    "ExpectedGradient": "codec.gradient_object",
    "ErrorFeedback": "codec.compress",
    "GatherOutcome": "sync.gather_results",
    "Mask": "codec.shared_indices",
    "MergedChunks": "codec.merged_chunks",
    "Participant": "sync.participant",
    "CheckedGradient": "codec.gradient_object",
    "GradientError": "codec.gradient_object",
    "QuorumError": "sync.gather_results",
    "WeightState": "state",
    "ChainStep": "sync.window_merge",
    "TrainingWindow": "sync.participant",
    "WorkerFactors": "merging.merge",
    "GatherWindow": "gather_window",
    "Sender": "gather_window",
    "merge_window": "sync.window_merge",
    "aggregate_run": "sync.aggregator",
    "commit_first_link": "merging.links",
    "ensure_run_begun": "sync.aggregator",
    "begin_run": "weights",
    "catch_up": "merging.links",
    "check_gradient": "codec.gradient_object",
    "check_weights": "weights",
    "decode": "codec.compress",
    "encode": "codec.compress",
    "merge_windows": "sync.windows",
    "gather": "sync.gather",
    "iterate_kept_links": "merging.links",
    "iterate_links": "merging.links",
    "read_link": "merging.links",
    "merge": "merging.merge",
    "find_newest_window": "merging.links",
    "load_newest_state": "weights",
    "encode_gradient": "codec.gradient_object",
    "read_gradient": "codec.gradient_object",
    "copy_state": "state",
    "load_checkpoint_state": "weights",
    "compute_worker_factors": "merging.merge",
    "select_weights": "sync.model_tensors",
    "ComputeLoss": "scoring.evaluation",
    "iterate_scores": "scoring.scorer",
    "load_compute_loss": "scoring.loss_function",
    "import_templar_run": "sync.templar_import",
    "score_run": "scoring.scorer",
    "read_newest_roster": "sync.registrations",
    "WorkerKey": "sync.worker_key",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use: settings and forms need neither numba nor torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_extra_module(f"millrace.gradients.{_MODULES[name]}", "gradients"), name)
