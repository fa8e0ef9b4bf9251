"""The deployment cooldown, by a worker on a machine of a Ray cluster."""

import pytest
from pydantic import SecretStr

from blocks import HuggingFaceCredentials
from millrace.checkpoints import HubSpec, open_destination, read_checkpoint, verify
from millrace.storage import Store, StoreSpec, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tests.integration.flows.test_cool_down import saved
from tests.prefect_server import PrefectServer, Worker
from tests.ray_cluster import DISK, RayCluster
from tests.support.flows.fixtures import MakeBlock


@pytest.fixture
def store(rgw: RGW, bucket: str) -> Store:
    pair = make_credentials(rgw.full)
    return open_store(StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=pair))


@pytest.mark.soak
def test_nodes_of_a_ray_cluster_end_an_epoch_with_what_is_on_their_disks(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
    store: Store,
) -> None:
    for disk in ray_cluster.disks[1:]:
        saved((disk / "checkpoints").as_uri())
    done = deployed.start(
        "cooldown/cooldown",
        bucket=block(bucket, write=rgw.full),
        job="job",
        epoch=0,
        nodes={"url": f"file://${DISK}/checkpoints", "job": "trained"},
    )
    assert done.code == 0, done.output
    found = read_checkpoint(store, "job", 40)
    assert not verify(store, found)
    report = deployed.read_artifacts(done.run)["cooldown"]
    assert report.count("| **committed** |") == 1
    assert report.count("took no part: There is no folder") == 1  # the head has none


@pytest.mark.soak
def test_nodes_of_a_ray_cluster_end_an_epoch_on_the_hub(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    rgw: RGW,
    hub: HubServer,
    bucket: str,
    block: MakeBlock,
) -> None:
    repo = hub.make_repo()
    HuggingFaceCredentials(token=SecretStr(WRITER), endpoint=hub.endpoint).save("epochs")
    for disk in ray_cluster.disks[1:]:
        saved((disk / "checkpoints").as_uri())
    asked = {
        "bucket": block(bucket, write=rgw.full),
        "job": "job",
        "epoch": 0,
        "hub": {
            "repo": repo,
            "credentials": {"$ref": {"block_document_slug": "hugging-face-credentials/epochs"}},
        },
    }
    refused = deployed.start("cooldown/cooldown", **asked)
    assert refused.code == 1
    done = deployed.start(
        "cooldown/cooldown",
        nodes={"url": f"file://${DISK}/checkpoints", "job": "trained"},
        **asked,
    )
    assert done.code == 0, done.output
    spec = HubSpec(repo=repo, token=SecretStr(READER), endpoint=hub.endpoint)
    assert open_destination(spec).read_checkpoint("job", 40).step == 40
    assert f"in `hf://{repo}" in deployed.read_artifacts(done.run)["cooldown"]
