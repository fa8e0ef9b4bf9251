"""Blocks as Prefect's UI saves them, which runs no validators."""

from typing import Any
from uuid import uuid4

from prefect.blocks.core import Block
from prefect.client.schemas.actions import BlockDocumentCreate

from tests.prefect_server import PrefectServer


def save_document(
    server: PrefectServer, kind: type[Block], data: dict[str, Any], name: str | None = None
) -> str:
    """Save the content of a block unchecked, and return the name of the block."""
    kind.register_type_and_schema()
    name = name or f"unchecked-{uuid4().hex[:8]}"
    document = BlockDocumentCreate(
        name=name,
        data=data,
        block_type_id=kind._block_type_id,
        block_schema_id=kind._block_schema_id,
    )
    with server.make_client() as client:
        client.create_block_document(document)
    return name
