"""Gradients of many workers: compressed, checked, and merged through a bucket."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_module_of
from millrace.gradients.settings import (
    AggregatorSettings,
    Beginning,
    FollowRules,
    FollowSettings,
    GatherSettings,
    MergeRule,
    MergeSettings,
    RunRules,
    RunSettings,
    WeightsOf,
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
        payload_bytes,
        read_payload,
    )
    from millrace.gradients.codec.shared_indices import Mask
    from millrace.gradients.codec.tensors import CodeError
    from millrace.gradients.state import State, state_of
    from millrace.gradients.sync.aggregator import aggregate_run, begin_chain
    from millrace.gradients.sync.chain import ChainError, begin, catch_up, links, newest
    from millrace.gradients.sync.follow import follow
    from millrace.gradients.sync.gather import Gathered, Out, QuorumError, Sender, Window, gather
    from millrace.gradients.sync.merge import Merged, Weights, merge, weights_of
    from millrace.gradients.sync.participant import Participant, Turn, weights_of_model
    from millrace.gradients.sync.window import Step, aggregate
    from millrace.gradients.weights import (
        begin_run,
        check_weights,
        newest_state,
        state_of_checkpoint,
    )

__all__ = [
    "AggregatorSettings",
    "Beginning",
    "ChainError",
    "ChainLink",
    "ChainStart",
    "CodeError",
    "Codec",
    "Decoder",
    "Expected",
    "Feedback",
    "FollowRules",
    "FollowSettings",
    "GatherSettings",
    "Gathered",
    "GradientEncoder",
    "GradientHeader",
    "Mask",
    "MergeRule",
    "MergeSettings",
    "Merged",
    "Out",
    "OuterKind",
    "OuterOptimizer",
    "Participant",
    "Payload",
    "PayloadError",
    "QuorumError",
    "Refusal",
    "RunRules",
    "RunSettings",
    "Sender",
    "State",
    "Step",
    "Support",
    "Transform",
    "Turn",
    "Weights",
    "WeightsOf",
    "Window",
    "WindowRules",
    "aggregate",
    "aggregate_run",
    "begin",
    "begin_chain",
    "begin_run",
    "catch_up",
    "check_payload",
    "check_weights",
    "decode",
    "encode",
    "follow",
    "gather",
    "links",
    "merge",
    "newest",
    "newest_state",
    "payload_bytes",
    "read_payload",
    "state_of",
    "state_of_checkpoint",
    "weights_of",
    "weights_of_model",
]

_MODULES = {
    "ChainError": "sync.chain",
    "CodeError": "codec.tensors",
    "Decoder": "codec.compress",
    "GradientEncoder": "codec.compress",
    "Expected": "codec.payload",
    "Feedback": "codec.compress",
    "Gathered": "sync.gather",
    "Mask": "codec.shared_indices",
    "Merged": "sync.merge",
    "Out": "sync.gather",
    "Participant": "sync.participant",
    "Payload": "codec.payload",
    "PayloadError": "codec.payload",
    "QuorumError": "sync.gather",
    "State": "state",
    "Step": "sync.window",
    "Turn": "sync.participant",
    "Weights": "sync.merge",
    "Window": "sync.gather",
    "Sender": "sync.gather",
    "aggregate": "sync.window",
    "aggregate_run": "sync.aggregator",
    "begin": "sync.chain",
    "begin_chain": "sync.aggregator",
    "begin_run": "weights",
    "catch_up": "sync.chain",
    "check_payload": "codec.payload",
    "check_weights": "weights",
    "decode": "codec.compress",
    "encode": "codec.compress",
    "follow": "sync.follow",
    "gather": "sync.gather",
    "links": "sync.chain",
    "merge": "sync.merge",
    "newest": "sync.chain",
    "newest_state": "weights",
    "payload_bytes": "codec.payload",
    "read_payload": "codec.payload",
    "state_of": "state",
    "state_of_checkpoint": "weights",
    "weights_of": "sync.merge",
    "weights_of_model": "sync.participant",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: settings and forms are read where numba and torch are not installed.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module_of(f"millrace.gradients.{_MODULES[name]}", "gradients"), name)
