"""Prefect blocks: credentials, locations, and cleaning rules."""

from blocks.bucket import Bucket, BucketRole
from blocks.hugging_face import HuggingFaceCredentials
from blocks.rules import CleaningRules
from blocks.vast import VastCredentials

__all__ = ["Bucket", "BucketRole", "CleaningRules", "HuggingFaceCredentials", "VastCredentials"]
