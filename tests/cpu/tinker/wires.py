"""Requests as bytes, without the client."""

import json
import time
import urllib.error
import urllib.request

import numpy as np

from lockstep.tinker.wire import PROTOBUF, message


def soon(claim):
    """Whether a claim becomes true within 10 s."""
    deadline = time.monotonic() + 10
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.02)
    return claim()


class Wire:
    """Requests without a client."""

    def __init__(self, served, key="tml-none"):
        self.url, self.key = f"{served.url}/api/v1", key
        session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        self.session = session[1]["session_id"]

    def send(self, path, body=None, kind="application/json", method=None, **headers):
        given = {"Content-Type": kind, "X-API-Key": self.key, **headers}
        request = urllib.request.Request(
            f"{self.url}/{path}", data=body, headers=given, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers["Content-Type"]

    def post(self, route, **body):
        status, raw, kind = self.send(route, json.dumps(body).encode())
        return status, json.loads(raw) if "json" in kind else raw

    def get(self, path):
        status, raw, _ = self.send(path)
        return status, json.loads(raw)

    def retrieve(self, request_id, **options):
        return self.post("retrieve_future", request_id=request_id, **options)

    def model(self, number=0, **lora):
        lora = {"rank": 8, "seed": 1} | lora
        status, found = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model="org/tiny",
            lora_config=lora,
        )
        assert status == 200, found
        assert self.retrieve(found["request_id"])[0] == 200
        return found["model_id"]

    def backward(self, model_id, seq_id, *, first=1, loss="cross_entropy"):
        found = message("ForwardBackwardRequest")
        found.model_id, found.seq_id, found.loss_fn = model_id, seq_id, loss
        datum = found.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([first, 2], "<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.array([2, 3], "<i8").tobytes(), 2
        status, raw, _ = self.send("forward_backward", found.SerializeToString(), PROTOBUF)
        return status, json.loads(raw)

    def step(self, model_id, seq_id, learning_rate=0.1):
        adam = {"learning_rate": learning_rate}
        return self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam)

    def sample(self, sampler_id, seq_id, *tokens, **changes):
        params = {"max_tokens": 4} | changes.pop("params", {})
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens) or [1]}]}
        return self.post(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=seq_id,
            prompt=prompt,
            sampling_params=params,
            **{"num_samples": 1, **changes},
        )

    def sampler(self, number=0):
        body = {"session_id": self.session, "sampling_session_seq_id": number}
        return self.post("create_sampling_session", base_model="org/tiny", **body)[1][
            "sampling_session_id"
        ]
