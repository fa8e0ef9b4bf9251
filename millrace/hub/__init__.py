"""Repositories of the Hugging Face Hub: their settings, and a client with retries."""

from millrace.hub.spec import HubSpec

__all__ = ["HubSpec"]
