import os

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def serve(tmp_path):
    """Makes servers with these settings, which are closed at the end."""
    from unigrams import Served

    servers = []

    def make(**settings):
        servers.append(Served(tmp_path / f"store{len(servers)}", **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def served(serve):
    return serve()


@pytest.fixture
def client_of(serve):
    """Makes clients of a server, which are closed before it."""
    pytest.importorskip("tinker._version")  # `tinker` alone would be this directory
    import tinker

    clients = []

    def make(served, key="tml-none"):
        clients.append(tinker.ServiceClient(base_url=served.url, api_key=key))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result(timeout=30)
