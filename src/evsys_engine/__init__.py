"""The local training engine: one frozen base model, any number of adapters, Tinker's semantics.

It knows tensors and nothing of experiments: it imports nothing of evsys_sdk. `evsys_sdk.backends.local` uses it in
process,
`evsys_engine.server` offers it over HTTP.
"""
