"""Run commands of a model where they can do no harm: bubblewrap, uids, seccomp, Landlock.

It knows processes and files, and nothing of experiments: it imports nothing of evsys_sdk.
"""
