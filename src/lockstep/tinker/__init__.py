"""Tinker's API: a request on its way from the socket to the gradient, or to the tokens.

server         HTTP: paths, keys, statuses of errors; over the listener of the gateway
service        start, recovery and end of one server; its sessions, and lists of what it has
models         accepts the requests of models in training, each once, and executes them in order
samplers       accepts requests for samples, and holds the latest weights in memory
futures        writes results into the journal, and hands them to the clients that ask

wire           protobuf and JSON as values of `requests`, and results as bytes
resources      what all of these share; remembers drawn replies, and `provenance` compares datums
               with them before training
journal        all of it in one sqlite file; `checkpoints` has the directories of weights
record         the run directory of each trained model

embedded       the backend: decoders, adapters and engines, whose pushed weights it verifies
learner        one model in training, with optimizer and checkpoints of `training.learner`
losses, graph  the published losses, and losses that clients upload
"""
