"""Pseudo-gradients of many workers: compressed, checked, and merged through a bucket."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_extra_module
from millrace.gradients.settings import (
    AggregatorSettings,
    FollowRules,
    FollowSettings,
    GatherSettings,
    InitialWeights,
    MergeRule,
    MergeSettings,
    RunRules,
    RunSettings,
    WeightsSource,
    WindowRules,
)
from millrace.schemas.chain import ChainLink, ChainStart, OuterKind, OuterOptimizer
from millrace.schemas.gradient import Codec, GradientHeader, Refusal, Support, Transform

if TYPE_CHECKING:
    from millrace.gradients.codec.compress import Decoder, Feedback, GradientEncoder, decode, encode
    from millrace.gradients.codec.payload import (
        Expected,
        Payload,
        PayloadError,
        check_payload,
        encode_payload,
        read_payload,
    )
    from millrace.gradients.codec.shared_indices import Mask
    from millrace.gradients.codec.tensors import CodeError
    from millrace.gradients.state import WeightState, copy_state
    from millrace.gradients.sync.aggregator import aggregate_run, begin_chain
    from millrace.gradients.sync.chain import (
        ChainError,
        catch_up,
        find_newest_window,
        iterate_links,
        start_chain,
    )
    from millrace.gradients.sync.follow import follow
    from millrace.gradients.sync.gather import (
        GatheredWindow,
        QuorumError,
        RejectedWorker,
        Sender,
        Window,
        gather,
    )
    from millrace.gradients.sync.merge import MergedRun, MergeWeights, compute_merge_weights, merge
    from millrace.gradients.sync.participant import Participant, TrainingWindow, select_weights
    from millrace.gradients.sync.window import ChainStep, aggregate
    from millrace.gradients.weights import (
        begin_run,
        check_weights,
        load_checkpoint_state,
        load_newest_state,
    )

__all__ = [
    "AggregatorSettings",
    "ChainError",
    "ChainLink",
    "ChainStart",
    "ChainStep",
    "CodeError",
    "Codec",
    "Decoder",
    "Expected",
    "Feedback",
    "FollowRules",
    "FollowSettings",
    "GatherSettings",
    "GatheredWindow",
    "GradientEncoder",
    "GradientHeader",
    "InitialWeights",
    "Mask",
    "MergeRule",
    "MergeSettings",
    "MergeWeights",
    "MergedRun",
    "OuterKind",
    "OuterOptimizer",
    "Participant",
    "Payload",
    "PayloadError",
    "QuorumError",
    "Refusal",
    "RejectedWorker",
    "RunRules",
    "RunSettings",
    "Sender",
    "Support",
    "TrainingWindow",
    "Transform",
    "WeightState",
    "WeightsSource",
    "Window",
    "WindowRules",
    "aggregate",
    "aggregate_run",
    "begin_chain",
    "begin_run",
    "catch_up",
    "check_payload",
    "check_weights",
    "compute_merge_weights",
    "copy_state",
    "decode",
    "encode",
    "encode_payload",
    "find_newest_window",
    "follow",
    "gather",
    "iterate_links",
    "load_checkpoint_state",
    "load_newest_state",
    "merge",
    "read_payload",
    "select_weights",
    "start_chain",
]

_MODULES = {
    "ChainError": "sync.chain",
    "CodeError": "codec.tensors",
    "Decoder": "codec.compress",
    "GradientEncoder": "codec.compress",
    "Expected": "codec.payload",
    "Feedback": "codec.compress",
    "GatheredWindow": "sync.gather",
    "Mask": "codec.shared_indices",
    "MergedRun": "sync.merge",
    "RejectedWorker": "sync.gather",
    "Participant": "sync.participant",
    "Payload": "codec.payload",
    "PayloadError": "codec.payload",
    "QuorumError": "sync.gather",
    "WeightState": "state",
    "ChainStep": "sync.window",
    "TrainingWindow": "sync.participant",
    "MergeWeights": "sync.merge",
    "Window": "sync.gather",
    "Sender": "sync.gather",
    "aggregate": "sync.window",
    "aggregate_run": "sync.aggregator",
    "start_chain": "sync.chain",
    "begin_chain": "sync.aggregator",
    "begin_run": "weights",
    "catch_up": "sync.chain",
    "check_payload": "codec.payload",
    "check_weights": "weights",
    "decode": "codec.compress",
    "encode": "codec.compress",
    "follow": "sync.follow",
    "gather": "sync.gather",
    "iterate_links": "sync.chain",
    "merge": "sync.merge",
    "find_newest_window": "sync.chain",
    "load_newest_state": "weights",
    "encode_payload": "codec.payload",
    "read_payload": "codec.payload",
    "copy_state": "state",
    "load_checkpoint_state": "weights",
    "compute_merge_weights": "sync.merge",
    "select_weights": "sync.participant",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use: settings and forms need neither numba nor torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_extra_module(f"millrace.gradients.{_MODULES[name]}", "gradients"), name)
