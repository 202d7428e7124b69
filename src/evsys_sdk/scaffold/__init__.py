"""New projects and new experiments as files: `evsys init-project` and `evsys new-experiment`.

The files lie in `template/`, with `.template` behind the names of those that would otherwise be read as code or as
git's settings here.
"""
