"""Every address that the real client knows is served, or refused by its name."""

import json
import re
import urllib.request
import warnings
from pathlib import Path

import pytest
from wires import Wire

pytest.importorskip("tinker._version")
import tinker
from tinker import types


def known_paths():
    """The paths in the source of the client, with an example in place of each parameter."""
    found = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if not file.name.endswith("_test.py"):
            found |= set(re.findall(r'f?"/api/v1/([\w/{}]+)"', file.read_text(encoding="utf-8")))
    examples = {"checkpoint_id": "weights/one"}
    return sorted(re.sub(r"{(\w+)}", lambda m: examples.get(m[1], "an-id"), path) for path in found)


def test_every_path_of_the_client_is_known(served):
    wire, paths = Wire(served), known_paths()
    assert len(paths) > 35 and "forward_backward" in paths
    for path in paths:
        told = [
            wire.send(path, b"{}" if method in ("POST", "PUT") else None, method=method)
            for method in ("GET", "POST", "PUT", "DELETE")
        ]
        assert any(b"served under /api/v1" not in text for _, text, _ in told), path
        assert all(status < 500 for status, _, _ in told), path
    assert wire.send("nonsense")[0] == 404


TINKER_PATH = "tinker://a/weights/one"
HOSTED_ONLY = {
    "publish": lambda rest: rest.publish_checkpoint_from_tinker_path(TINKER_PATH),
    "unpublish": lambda rest: rest.unpublish_checkpoint_from_tinker_path(TINKER_PATH),
    "audit": lambda rest: rest.get_audit_log(),
    "billing": lambda rest: rest.get_billing_usage("2026-01-01", "2026-02-01"),
    "storage": lambda rest: rest.get_current_checkpoint_storage_usage(),
    "copy": lambda rest: rest.copy_weights(TINKER_PATH, "project"),
    "project": lambda rest: rest.assign_session_project("a", "project"),
    "trace": lambda rest: rest.export_session_trace("a"),
    "search": lambda rest: rest.search_sessions(types.SessionSearchRequest()),
    "external": lambda rest: rest.get_external_weights_urls("tinker://a/external_weights/one"),
}


@pytest.mark.parametrize("name", HOSTED_ONLY)
def test_what_the_hosted_service_alone_has_raises_at_once_with_its_name(served, name):
    """501 would be repeated for five minutes."""
    rest = tinker.RestClient(base_url=served.url, api_key="tml-none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental and deprecated ones
        with pytest.raises(tinker.NotFoundError, match="hosted service"):
            HOSTED_ONLY[name](rest).result()


def test_weights_for_other_providers_are_refused_and_the_next_request_is_executed(
    served, client_of
):
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(tinker.NotFoundError, match="lockstep export"):
            train.save_weights_external("one").result()
    assert train.optim_step(types.AdamParams()).result()


def test_what_a_server_should_have_is_answered(served, client_of):
    """The addresses that recipes use beside training: capabilities, health, listings."""
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    wire = Wire(served)
    assert wire.get("healthz") == (200, {"status": "ok"})
    (model,) = wire.get("get_server_capabilities")[1]["supported_models"]
    assert model["trainable"] and model["sampleable"] and model["max_context_length"] == 64
    rest = tinker.RestClient(base_url=served.url, api_key="tml-none")
    run = rest.get_training_run(train.model_id).result()
    assert (run.base_model, run.is_lora, run.lora_rank) == ("org/tiny", True, 8)
    listed = rest.list_training_runs(limit=1, offset=0).result()
    assert listed.cursor.total_count == 1
    session = train.model_id.partition(":")[0]
    assert session in rest.list_sessions().result().sessions
    with urllib.request.urlopen(served.url) as answer:  # the page for people
        page = answer.read().decode()
    assert f"<code>{served.url}</code>" in page and "training runs</td><td><span>1<" in page
    sampler = train.save_weights_and_get_sampling_client().result()
    found = rest.get_sampler(sampler._sampling_session_id).result()
    assert found.base_model == "org/tiny" and found.model_path is None
    assert rest.get_session(session).result().sampler_ids == [found.sampler_id]


def test_flags_for_clients_are_of_known_names(served):
    from tinker.types.client_config_response import ClientConfigResponse

    given = Wire(served).post("client/config", sdk_version="0.38.0")[1]
    of_older_clients = {"proto_write_fwdbwd", "fwd_via_fwdbwd"}
    assert set(given) - of_older_clients <= set(ClientConfigResponse.model_fields)
    assert ClientConfigResponse.model_validate(given).custom_loss_server_side
    assert json.loads(Wire(served).send("client/dynamic_config", b"{}")[1])["sample_cancel_enabled"]
