"""The flow audit-access, on buckets with credentials from blocks."""

import secrets

from flows.audit_access import audit_access
from millrace.testing.rgw import RGW
from tasks.reports import escape
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import MakeBlock


def test_what_credentials_can_do_is_proven_or_fails_the_flow(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    good = {"bucket": block(bucket, read=rgw.read_only, write=rgw.full)}
    done = prefect_api.call(audit_access, buckets=[good])
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["audited-access"]
    assert "18 operations tried, all as they should be." in report
    assert "dataset: The store checks a signed SHA" in report
    assert "| dataset, to read | allowed | allowed | allowed | denied | denied |" in report

    other = rgw.create_bucket(f"bucket-{secrets.token_hex(6)}")
    swapped = {"bucket": block(other, read=rgw.full, write=rgw.read_only)}
    done = prefect_api.call(audit_access, buckets=[good, swapped])
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "are not as they should be" in (state.message or "")
    report = prefect_api.read_artifacts(done.run)["audited-access"]
    assert escape(f"The credentials reach s3://{other}.") in report
    assert "| dataset 2, to write | put | insufficient |" in report
    assert rgw.full.secret_access_key not in report
