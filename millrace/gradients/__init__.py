"""Gradients of many workers: compressed, checked, and merged through a bucket."""

from millrace.gradients.aggregating import Step, aggregate
from millrace.gradients.aggregator import (
    AggregatorSettings,
    Beginning,
    FollowRules,
    FollowSettings,
    WeightsOf,
    aggregate_run,
)
from millrace.gradients.chain import ChainError, begin, catch_up, links
from millrace.gradients.compress import Decoder, Encoder, Feedback, decode, encode
from millrace.gradients.gathering import (
    Gathered,
    GatherSettings,
    Out,
    QuorumError,
    Window,
    Worker,
    gather,
)
from millrace.gradients.merging import Merged, MergeSettings, Rule, Weights, merge, weights_of
from millrace.gradients.participant import Participant, Turn, weights_of_model
from millrace.gradients.payload import (
    Expected,
    Payload,
    PayloadError,
    check_payload,
    payload_bytes,
    read_payload,
)
from millrace.gradients.running import RunRules, RunSettings, follow
from millrace.gradients.shared import Mask
from millrace.gradients.state import State, state_of
from millrace.gradients.tensors import CodeError
from millrace.gradients.weights import begin_run, newest_state, state_of_checkpoint
from millrace.models.chain import Link, Outer, OuterKind, Start
from millrace.models.gradient import Codec, GradientHeader, Refusal, Support, Transform

__all__ = [
    "AggregatorSettings",
    "Beginning",
    "ChainError",
    "CodeError",
    "Codec",
    "Decoder",
    "Encoder",
    "Expected",
    "Feedback",
    "FollowRules",
    "FollowSettings",
    "GatherSettings",
    "Gathered",
    "GradientHeader",
    "Link",
    "Mask",
    "MergeSettings",
    "Merged",
    "Out",
    "Outer",
    "OuterKind",
    "Participant",
    "Payload",
    "PayloadError",
    "QuorumError",
    "Refusal",
    "Rule",
    "RunRules",
    "RunSettings",
    "Start",
    "State",
    "Step",
    "Support",
    "Transform",
    "Turn",
    "Weights",
    "WeightsOf",
    "Window",
    "Worker",
    "aggregate",
    "aggregate_run",
    "begin",
    "begin_run",
    "catch_up",
    "check_payload",
    "decode",
    "encode",
    "follow",
    "gather",
    "links",
    "merge",
    "newest_state",
    "payload_bytes",
    "read_payload",
    "state_of",
    "state_of_checkpoint",
    "weights_of",
    "weights_of_model",
]
