"""What Prefect keeps for a person: credentials and places."""

from blocks.bucket import Bucket, Role
from blocks.hugging_face import HuggingFaceCredentials
from blocks.vast import VastCredentials

__all__ = ["Bucket", "HuggingFaceCredentials", "Role", "VastCredentials"]
