"""`.ci/run`: bubblewrap, a browser and PostgreSQL where they can be had, and `make test` in any case."""

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
    # PostgreSQL is looked for by a path outside PATH, so it is made to be there or not by the script's own text.
    script = tmp_path / ".ci" / "run"
    script.write_text(script.read_text().replace("/usr/lib/postgresql", str(tmp_path / "postgresql")))
    stub(commands / "make", f'echo "make $* $PYTEST_ADDOPTS" >>{tmp_path}/calls')

    def run(**stubs: str):
        for name, body in stubs.items():
            stub(commands / name.replace("_", "-"), f'echo "{name} $*" >>{tmp_path}/calls\n{body}')
        done = subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")],
            env={"PATH": str(commands)}, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, done.stderr, [call.split(" -o DPkg::Lock::Timeout=300 ")[-1].strip() for call in calls]

    run.commands = commands
    return run


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


TEST = "make test  -rs"
PACKAGES = ("bubblewrap", "chromium", "postgresql")


def install(package: str) -> str:
    return f"install -y --no-install-recommends {package}"


@pytest.fixture
def with_postgresql(tmp_path):
    folder = tmp_path / "postgresql" / "15" / "bin"
    folder.mkdir(parents=True)
    stub(folder / "initdb", "")


@pytest.mark.usefixtures("with_postgresql")
def test_with_everything_there_it_only_runs_the_tests(ci):
    assert ci(bwrap="", chromium="", apt_get="") == (0, "", [TEST])


@pytest.mark.usefixtures("with_postgresql")
def test_a_missing_package_is_installed_first(ci):
    code, said, calls = ci(chromium="", apt_get="")
    assert (code, calls) == (0, [install("bubblewrap"), TEST])
    assert "bubblewrap is missing; installing it" in said and "installed bubblewrap" in said


def test_lists_that_are_too_old_are_fetched_and_it_is_tried_again(ci):
    old = f'[[ -e {ci.commands}/list ]] || case "$*" in *update) >{ci.commands}/list ;; *) exit 100 ;; esac'
    code, said, calls = ci(apt_get=old)
    first, *others = (install(package) for package in PACKAGES)
    assert (code, calls) == (0, [first, "update", first, *others, TEST])
    assert "could not" not in said


def test_where_they_cannot_be_installed_the_tests_run_all_the_same(ci):
    code, said, calls = ci(apt_get="echo no way >&2; exit 100")
    assert (code, calls[-1]) == (0, TEST)
    assert "no way" in said
    assert all(
        f"{package} could not be installed (see above): tests that need it will skip" in said for package in PACKAGES
    )


def test_without_apt_the_tests_run_all_the_same(ci):
    code, said, calls = ci()
    assert (code, calls) == (0, [TEST])
    assert all(f"no apt-get here: tests that need {package} will skip" in said for package in PACKAGES)


@pytest.mark.usefixtures("with_postgresql")
def test_the_tests_result_is_its_own(ci):
    assert ci(bwrap="", chromium="", make="exit 3")[0] == 3
