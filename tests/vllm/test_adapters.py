"""Adapters in vLLM's server, and a server that is started again because nothing else is right."""
