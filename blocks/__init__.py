"""What Prefect keeps for a person: credentials, places, and rules."""

from blocks.bucket import Bucket, Role
from blocks.hugging_face import HuggingFaceCredentials
from blocks.rules import CleaningRules
from blocks.vast import VastCredentials

__all__ = ["Bucket", "CleaningRules", "HuggingFaceCredentials", "Role", "VastCredentials"]
