"""The guide to the swarm, block by block: on a Ray cluster, and on machines without Ray."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest
import zstandard

from millrace.settings import load_settings
from millrace.storage import open_store, put
from millrace.swarm import PrewarmSettings
from millrace.testing.process import REPOSITORY, find_free_ports
from tests.prefect_server import wait_until
from tests.ray_cluster import DISK, RayCluster
from tests.support.guides import follow

FILES = {
    "llama/weights.bin": b"w" * 3_000_000,
    "tokenizer/words.txt": b"one two three",
    "vocabulary.json": b'{"one": 1}',
}


def test_every_block_of_the_guide_to_the_swarm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ray_cluster: RayCluster,
    credentials: dict[str, str],
    bucket: str,
) -> None:
    folder, ports = tmp_path / "swarm", find_free_ports(2)
    values = {
        "r2://${R2_DATASET_ACCOUNT_ID}/": "s3://",
        "$SCRATCH/": f"${DISK}/{tmp_path.name}/",
        "=...": f"={'k' * 32}",
    }
    environment = {
        **credentials,
        **ray_cluster.environment,
        "RAY_ADDRESS": ray_cluster.address,
        "R2_DATASET_BUCKET_NAME": bucket,
        "MILLRACE_NODE_KEY": "k" * 32,
        # The tests share their environment: pip resolves the extra, and installs nothing.
        "PIP_DRY_RUN": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round: no isolation
    }
    with follow("swarm", folder, monkeypatch, values=values, environment=environment) as guide:
        upload(f"s3://{bucket}")
        guide.write("prewarm.yaml")
        for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, folder)
        shown = guide.run()
        assert "does not provide the extra" not in shown
        for disk in ray_cluster.disks:
            assert FILES.items() <= read_files(disk / tmp_path.name / "warm").items()

        (folder / "evaluate.py").write_text(guide.read_python())
        assert guide.type("python evaluate.py").count("weights.bin") == 4

        roots = [tmp_path / "data-0", tmp_path / "data-1"]
        machines = [
            {"/data": str(root), "0.0.0.0": "127.0.0.1", "7000": str(port)}
            for root, port in zip(roots, ports, strict=True)
        ]
        nodes = guide.serve(*machines)
        for node in nodes:
            wait_until(lambda node=node: "http" in node.output, "an agent that listens")
        urls = {
            f"10.0.0.{number}:7000": f"127.0.0.1:{port}" for number, port in enumerate(ports, 1)
        }
        path = guide.write("prewarm.yaml", urls, update=True)
        assert len(load_settings(path, PrewarmSettings, environment).nodes.hosts) == 2  # pyright: ignore[reportAttributeAccessIssue]
        guide.type("millrace swarm prewarm")
        for root in roots:
            assert FILES.items() <= read_files(root).items()

        left = roots[0] / "llama" / f".{'0' * 16}.{'1' * 16}.part"
        left.write_bytes(b"half")
        assert str(left.relative_to(roots[0])) in guide.run({"/data": str(roots[0])})


def upload(url: str) -> None:
    """Upload what the guide's requests name."""
    store = open_store(url)
    put(store, "models/llama/weights.bin", FILES["llama/weights.bin"])
    with io.BytesIO() as body:
        with tarfile.open(fileobj=body, mode="w") as tar:
            member = tarfile.TarInfo("words.txt")
            member.size = len(FILES["tokenizer/words.txt"])
            tar.addfile(member, io.BytesIO(FILES["tokenizer/words.txt"]))
        put(store, "tokenizer.tar.zst", zstandard.compress(body.getvalue()))
    put(store, "vocabulary.json.gz", gzip.compress(FILES["vocabulary.json"]))


def read_files(root: Path) -> dict[str, bytes]:
    """Return the files below a root, without what Millrace notes for itself."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".millrace" not in path.parts
    }
