"""Names of environment variables and files that more than one module speaks of."""

from __future__ import annotations

API_PREFIX = "/api/dashboard/api"

ENV_API_URL = "EVSYS_API_URL"
ENV_API_KEY = "EVSYS_API_KEY"
ENV_PROJECT_ID = "EVSYS_PROJECT_ID"
ENV_LOG_DIR = "EVSYS_LOG_DIR"
ENV_OFFLINE = "EVSYS_OFFLINE"
ENV_LOGGING_LEVEL = "EVSYS_LOGGING_LEVEL"
ENV_PROJECT_DIR = "EVSYS_PROJECT_DIR"
ENV_LAUNCH_FD = "EVSYS_LAUNCH_FD"
"""Set for the process that `evsys run --detach` starts: the descriptor on which it tells of its launch."""

DEFAULT_API_URL = "http://localhost:8000"
DEFAULT_LOG_DIR = ".evsys/mirror"

WORKSPACE_DIR = ".evsys"
RUN_RESULT_FILE = "run_result.json"
EXPERIMENT_RESULT_FILE = "experiment_result.json"
JOURNAL_FILE = "journal.sqlite"
MODEL_ROLLOUTS_FILE = "models.rollouts.jsonl"
CALLS_FILE = "prompt_calls.jsonl"
"""What a prompt search paid for; in a chain, each stage has its own, named `<stage>.prompt_calls.jsonl`."""
DEPLOYMENTS_FILE = "deployments.jsonl"
LAUNCH_FILE = "launch.json"
STOP_FILE = "stop.json"
LOG_FILE = "log"

UNTRAINED = "untrained"
"""What a comparison calls the model before training."""
START = "its starting weights"
"""What it is called where training starts from a checkpoint (`load_checkpoint_path`)."""

VERIFIER_SECONDS = 600.0
"""How long a verifier may take over one answer where nothing else is said."""

EXIT_OK = 0
EXIT_BAD_INPUT = 1
EXIT_RUN_FAILED = 2
"""`evsys run`: at least one run did not complete."""

MANY_ERRORS = 0.1
"""Share of errored rollouts from which a warning stands before the verdict. Chosen: an arm of 0.9 with a tenth of its
rollouts lost scores about 0.81, a difference that sweeps of this size are run to find."""
