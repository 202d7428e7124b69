"""`.ci/run`: bubblewrap where it can be had, and `make test` in any case."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
TOOLS = ("bash", "cat", "chmod", "dirname", "env", "id", "timeout")


@pytest.fixture
def ci(tmp_path):
    """Runs the script where only these commands exist, and tells its exit code, what was said, and what was called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    commands = tmp_path / "bin"
    commands.mkdir()
    for tool in TOOLS:
        (commands / tool).symlink_to(shutil.which(tool))
    stub(commands / "sudo", 'shift; exec "$@"')  # for those who do not run the tests as root
    stub(commands / "make", f'echo "make $* $PYTEST_ADDOPTS" >>{tmp_path}/calls')

    def run(**stubs: str):
        for name, body in stubs.items():
            stub(commands / name.replace("_", "-"), f'echo "{name} $*" >>{tmp_path}/calls\n{body}')
        done = subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")],
            env={"PATH": str(commands)}, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, done.stderr, [call.split(" -o Dpkg::Use-Pty=0 ")[-1].strip() for call in calls]

    run.commands = commands
    return run


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


INSTALL, TEST = "install -y --no-install-recommends bubblewrap", "make test  -rs"


def test_with_bubblewrap_there_it_only_runs_the_tests(ci):
    assert ci(bwrap="", apt_get="") == (0, "", [TEST])


def test_a_missing_bubblewrap_is_installed_first(ci):
    makes = f"printf '#!/usr/bin/env bash\\necho bubblewrap 9' >{ci.commands}/bwrap; chmod 755 {ci.commands}/bwrap"
    code, said, calls = ci(apt_get=makes)
    assert (code, calls) == (0, [INSTALL, TEST])
    assert "bubblewrap is missing; installing it" in said and "installed bubblewrap 9" in said


def test_lists_that_are_too_old_are_fetched_and_it_is_tried_again(ci):
    old = f'[[ -e {ci.commands}/list ]] || case "$*" in *update) >{ci.commands}/list ;; *) exit 100 ;; esac'
    code, said, calls = ci(apt_get=old)
    assert (code, calls) == (0, [INSTALL, "update", INSTALL, TEST])
    assert "could not" not in said


def test_where_it_cannot_be_installed_the_tests_run_all_the_same(ci):
    code, said, calls = ci(apt_get="echo no way >&2; exit 100")
    assert (code, calls[-1]) == (0, TEST)
    assert "no way" in said and "the tests of the sandbox will skip" in said


def test_without_apt_the_tests_run_all_the_same(ci):
    code, said, calls = ci()
    assert (code, calls) == (0, [TEST])
    assert "no apt-get here" in said


def test_the_tests_result_is_its_own(ci):
    assert ci(bwrap="", make="exit 3")[0] == 3
