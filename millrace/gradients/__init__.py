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
from millrace.models.chain import ChainLink, ChainStart, OuterKind, OuterOptimizer
from millrace.models.gradient import Codec, GradientHeader, Refusal, Support, Transform

if TYPE_CHECKING:
    from millrace.gradients.aggregating import Step, aggregate
    from millrace.gradients.aggregator import aggregate_run, begin_chain
    from millrace.gradients.chain import ChainError, begin, catch_up, links, newest
    from millrace.gradients.compress import Decoder, Feedback, GradientEncoder, decode, encode
    from millrace.gradients.gathering import Gathered, Out, QuorumError, Sender, Window, gather
    from millrace.gradients.merging import Merged, Weights, merge, weights_of
    from millrace.gradients.participant import Participant, Turn, weights_of_model
    from millrace.gradients.payload import (
        Expected,
        Payload,
        PayloadError,
        check_payload,
        payload_bytes,
        read_payload,
    )
    from millrace.gradients.running import follow
    from millrace.gradients.shared import Mask
    from millrace.gradients.state import State, state_of
    from millrace.gradients.tensors import CodeError
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
    "ChainError": "chain",
    "CodeError": "tensors",
    "Decoder": "compress",
    "GradientEncoder": "compress",
    "Expected": "payload",
    "Feedback": "compress",
    "Gathered": "gathering",
    "Mask": "shared",
    "Merged": "merging",
    "Out": "gathering",
    "Participant": "participant",
    "Payload": "payload",
    "PayloadError": "payload",
    "QuorumError": "gathering",
    "State": "state",
    "Step": "aggregating",
    "Turn": "participant",
    "Weights": "merging",
    "Window": "gathering",
    "Sender": "gathering",
    "aggregate": "aggregating",
    "aggregate_run": "aggregator",
    "begin": "chain",
    "begin_chain": "aggregator",
    "begin_run": "weights",
    "catch_up": "chain",
    "check_payload": "payload",
    "check_weights": "weights",
    "decode": "compress",
    "encode": "compress",
    "follow": "running",
    "gather": "gathering",
    "links": "chain",
    "merge": "merging",
    "newest": "chain",
    "newest_state": "weights",
    "payload_bytes": "payload",
    "read_payload": "payload",
    "state_of": "state",
    "state_of_checkpoint": "weights",
    "weights_of": "merging",
    "weights_of_model": "participant",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: settings and forms are read where numba and torch are not installed.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module_of(f"millrace.gradients.{_MODULES[name]}", "gradients"), name)
