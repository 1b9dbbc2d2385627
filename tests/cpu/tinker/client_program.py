"""Programs of the tinker client that run with old versions of it, too:

    python client_program.py URL SCENARIO

They import nothing of Lockstep. The server is that of unigrams.py: models of one logit per id.
"""

import inspect
import os
import pickle
import sys

os.environ.update(TINKER_TELEMETRY="0", TINKER_API_KEY="tml-none", HF_HUB_OFFLINE="1")
# The client asks for torch where a loss runs in it; that of the tests' environment will do.
sys.path += filter(None, [os.environ.get("TORCH_PATH", "")])

import tinker
from tinker import types

PARAMS = types.SamplingParams(max_tokens=8, seed=3)


def ints(*ids):
    return types.ModelInput.from_ints(list(ids))


def datum(num=3, first=1, **inputs):
    given = {"target_tokens": list(range(2, num + 2)), "weights": [1.0] * num, **inputs}
    tensors = {
        name: types.TensorData(
            data=values,
            dtype="int64" if name == "target_tokens" else "float32",
            shape=[len(values)],
        )
        for name, values in given.items()
        if values is not None
    }
    return types.Datum(model_input=ints(first, *range(2, num + 1)), loss_fn_inputs=tensors)


def raises(text, do):
    """Whether a call raises an error with this text."""
    try:
        found = do()
        found = found.result() if hasattr(found, "result") else found
    except Exception as error:
        assert text in str(error), f"{type(error).__name__}: {error}"
        return True
    raise AssertionError(f"{found!r} came, and no error with {text!r}")


def trains_saves_samples_and_resumes(service, train):
    first = train.forward_backward([datum(), datum(5)], "cross_entropy")
    step = train.optim_step(types.AdamParams(learning_rate=0.1))
    found = first.result()
    assert [len(each["logprobs"].data) for each in found.loss_fn_outputs] == [3, 5]
    total = sum(sum(each["logprobs"].data) for each in found.loss_fn_outputs)
    assert abs(found.metrics["loss:sum"] + total) < 1e-3
    assert step.result() is not None
    path = train.save_state("first").result().path
    assert path == f"tinker://{train.model_id}/weights/first"
    after = train.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    train.optim_step(types.AdamParams(learning_rate=0.1)).result()
    make = service.create_training_client_from_state_with_optimizer
    resumed = make(path)
    assert resumed.get_info().model_data.model_name == "org/tiny"
    assert resumed.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == after
    assert train.save_weights_for_sampler("two").result().path.endswith("/sampler_weights/two")
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(train.model_id).result().checkpoints
    assert {each.checkpoint_id for each in listed} == {"weights/first", "sampler_weights/two"}


def samples(service, train):
    sampler = train.save_weights_and_get_sampling_client("one")
    found = sampler.sample(ints(1, 2, 3), 2, PARAMS).result()
    assert len(found.sequences) == 2
    for each in found.sequences:
        assert len(each.tokens) == len(each.logprobs) and all(one < 0 for one in each.logprobs)
    scored = sampler.compute_logprobs(ints(4, 5, 6)).result()
    assert scored[0] is None and all(one < 0 for one in scored[1:])
    given = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    found = sampler.sample(ints(1, 2, 3), 1, PARAMS, **given).result()
    assert found.prompt_logprobs[0] is None and len(found.topk_prompt_logprobs) == 3
    assert len(found.topk_prompt_logprobs[1]) == 2
    again = pickle.loads(pickle.dumps(sampler)).sample(ints(1, 2, 3), 2, PARAMS).result()
    assert [each.tokens for each in again.sequences] == [
        each.tokens for each in sampler.sample(ints(1, 2, 3), 2, PARAMS).result().sequences
    ]
    base = service.create_sampling_client(base_model="org/tiny")
    assert base.sample(ints(1), 1, PARAMS).result().sequences


def chunks_come_in_any_order(service, train):
    """The client sends 1024 datums at a time, the first ones last."""
    data = [datum(first=11 + at // 1024) for at in range(2 * 1024 + 5)]
    passed = train.forward_backward(data, "cross_entropy")
    step = train.optim_step(types.AdamParams(learning_rate=0.5))
    assert len(passed.result().loss_fn_outputs) == len(data) and step.result() is not None


def refusals_raise_and_the_next_request_goes_through(service, train):
    for loss in ("nonsense", "grpo"):
        assert raises("expected one of", lambda loss=loss: train.forward_backward([datum()], loss))
    short = datum(weights=[1.0])
    assert raises("data[0]", lambda: train.forward_backward([short], "cross_entropy"))
    assert raises(
        "unlucky", lambda: train.forward_backward([datum()], "cross_entropy", {"beta": 13.0})
    )
    assert raises("expected 'org/tiny'", lambda: service.create_lora_training_client("org/other"))
    assert raises("without a slash", lambda: train.save_state("../evil"))
    assert train.forward_backward([datum()], "cross_entropy").result().metrics
    assert train.optim_step(types.AdamParams()).result() is not None


def a_loss_runs_in_the_client(service, train):
    def loss(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {"seen": 1.0}

    found = train.forward_backward_custom([datum(), datum(4)], loss)
    step = train.optim_step(types.AdamParams(learning_rate=0.1))
    assert found.result().metrics["seen"] == 1.0 and step.result() is not None


def rows_that_were_drawn_are_known_by_their_content(service, train):
    sampler = train.save_weights_and_get_sampling_client("one")
    reply = sampler.sample(ints(1, 2, 3), 1, PARAMS).result().sequences[0]
    ids, num = [1, 2, 3, *reply.tokens], len(reply.tokens)

    def row(logprobs):
        found = datum(len(ids) - 1, target_tokens=ids[1:], weights=None)
        inputs = {"logprobs": [0.0, 0.0, *logprobs], "advantages": [0.0, 0.0, *[1.0] * num]}
        inputs = {
            name: types.TensorData(data=values, dtype="float32", shape=[len(values)])
            for name, values in inputs.items()
        }
        tensors = {**found.loss_fn_inputs, **inputs}
        return types.Datum(model_input=ints(*ids[:-1]), loss_fn_inputs=tensors)

    found = train.forward_backward([row(reply.logprobs)], "importance_sampling").result()
    assert found.metrics["provenance/drawn:sum"] == 1
    wrong = row([2 * one for one in reply.logprobs])
    assert raises("Nothing was trained", lambda: train.forward_backward([wrong], "ppo"))


def run(url, scenario):
    service = tinker.ServiceClient(base_url=url)
    train = service.create_lora_training_client("org/tiny", rank=8, seed=1)
    scenario(service, train)
    if hasattr(service, "close"):
        closed = service.close("success")
        closed.result() if hasattr(closed, "result") else closed
    print("done", tinker.__version__, flush=True)
    os._exit(0)  # threads of 0.24 may abort the interpreter at its end, beside torch


SCENARIOS = {
    name: each
    for name, each in list(globals().items())
    if inspect.isfunction(each) and [*inspect.signature(each).parameters] == ["service", "train"]
}

if __name__ == "__main__":
    run(sys.argv[1], SCENARIOS[sys.argv[2]])
