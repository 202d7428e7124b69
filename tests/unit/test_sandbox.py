"""The sandbox is attacked: what a model's code may try, and what must come of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from evsys_sandbox import sandbox
from evsys_sandbox.errors import SandboxError, SandboxUnavailable
from evsys_sandbox.launch import SandboxLimits
from evsys_sandbox.sandbox import Sandbox, run_sandboxed, why_unavailable

MISSING = why_unavailable()
needs_bubblewrap = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(not os.path.exists(PYTHON), reason="there is no /usr/bin/python3 to attack with")


def python(code: str, **options):
    """The code, run by the sandbox's own Python."""
    return run_sandboxed([PYTHON, "attack.py"], files={"attack.py": textwrap.dedent(code)}, **options)


def alive(mark: str) -> list[str]:
    """Processes anywhere on this machine whose command line holds the mark."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in place.read_text(errors="replace") and str(os.getpid()) != place.parent.name:
                found.append(place.parent.name)
        except OSError:
            continue
    return found


def mark_seconds() -> str:
    """A sleep that can be told from every other sleep on the machine."""
    return f"9{uuid.uuid4().int % 10**9}"


@needs_bubblewrap
async def test_a_command_gets_its_files_and_gives_its_output_and_exit_code():
    result = await run_sandboxed(
        "cat data/in.txt /tests/t; pwd; echo bad >&2; exit 3", files={"data/in.txt": "in\n", "/tests/t": b"t\n"}
    )
    assert (result.exit_code, result.stdout, result.stderr) == (3, "in\nt\n/app\n", "bad\n")
    assert not result.timed_out and 0 < result.seconds < 30


@needs_bubblewrap
async def test_the_environment_is_what_was_given_and_nothing_else():
    result = await run_sandboxed("env", env={"GIVEN": "a b"})
    names = {line.split("=")[0] for line in result.stdout.splitlines()}
    assert "GIVEN=a b" in result.stdout.splitlines()
    assert names <= {"GIVEN", "PATH", "HOME", "LANG", "USER", "PWD", "SHLVL", "_", "ASAN_OPTIONS", "LSAN_OPTIONS"}


@needs_bubblewrap
@needs_python
async def test_there_is_no_network_not_even_the_hosts_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = await python(f"""
            import socket
            for place in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("169.254.169.254", 80)):
                try:
                    socket.create_connection(place, timeout=2)
                    print("REACHED", place)
                except OSError as exc:
                    print(type(exc).__name__)
        """)
    assert result.exit_code == 0 and "REACHED" not in result.stdout


@needs_bubblewrap
async def test_host_files_cannot_be_seen(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden treasure")
    places = f"{secret} /etc/shadow /root/.bashrc /proc/1/root{secret} /proc/self/root{secret} /proc/1/cwd/etc/shadow"
    result = await run_sandboxed(f"cat {places}; ls / /home /root /var /run /sys; cat /etc/passwd")
    assert "treasure" not in result.stdout and "$" not in result.stdout
    assert "user:x:1000" in result.stdout and len(result.stdout.split("user:x:1000")[0].splitlines()) < 30


@needs_bubblewrap
async def test_nothing_can_be_written_but_its_own_folders():
    places = "/x /usr/x /etc/x /dev/x /proc/sys/kernel/core_pattern /bin/x /etc/passwd /proc/sysrq-trigger"
    result = await run_sandboxed(
        f"for f in {places}; do (echo x > $f) 2>/dev/null && echo WROTE $f; done; echo x > /tmp/x"
    )
    assert result.stdout == "" and result.exit_code == 0
    assert Path("/proc/sys/kernel/core_pattern").read_text() != "x\n"


@needs_bubblewrap
async def test_the_launchers_environment_cannot_be_read(monkeypatch):
    monkeypatch.setenv("EVSYS_SECRET", "hidden-treasure")
    result = await run_sandboxed("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert "treasure" not in result.stdout
    assert "evsys-sandbox-" not in result.stdout, "where its folders lie on the host is nobody's business inside"


@needs_bubblewrap
async def test_it_is_nobody_on_the_host_and_has_no_way_up():
    async with Sandbox() as box:
        result = await box.run(
            "touch mine; grep -E 'Cap|NoNewPrivs|Groups' /proc/self/status; unshare -U true; unshare -r id"
        )
        owner = os.stat(box._place / "0" / "mine").st_uid
    status = dict(line.split(":\t") for line in result.stdout.splitlines() if ":\t" in line)
    assert all(int(value, 16) == 0 for name, value in status.items() if name.startswith("Cap"))
    assert status["NoNewPrivs"] == "1" and result.exit_code != 0 and "uid=0" not in result.stdout
    assert owner != 0


@needs_bubblewrap
async def test_no_open_file_of_ours_is_inherited(tmp_path):
    with open(tmp_path / "open.txt", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        result = await run_sandboxed("ls -l /proc/self/fd /proc/1/fd")
    assert "open.txt" not in result.stdout and "memfd" not in result.stdout.split("/proc/1/fd")[1]
    assert " 2 -> " in result.stdout


KEYRINGS = """
import ctypes, platform
kernel = ctypes.CDLL(None, use_errno=True).syscall
ADD, CONTROL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine(), (0, 0))

def add(name, secret):
    return kernel(ADD, b"user", name, secret, len(secret), -3)

def read(name):
    found = ctypes.create_string_buffer(64)
    kernel(CONTROL, 11, kernel(CONTROL, 10, -3, b"user", name, 0), found, 64)
    return found.value.decode()
"""
KEY_THIEF = (
    KEYRINGS + "print([read(b'of-host'), read(b'left'), add(b'left', b'LEFT')])\nprint(open('/proc/keys').read())"
)
KEY_OWNER = (
    KEYRINGS
    + """
import asyncio, sys
from evsys_sandbox.sandbox import run_sandboxed
kernel(CONTROL, 1, None)  # a session keyring of this process alone
if not CONTROL or add(b"of-host", b"SECRET") < 0:
    sys.exit("no keyrings")
assert read(b"of-host") == "SECRET"
for _ in range(2):
    done = asyncio.run(run_sandboxed(["/usr/bin/python3", "thief.py"], files={"thief.py": sys.argv[1]}))
    print(done.stdout, done.stderr)
"""
)


@needs_bubblewrap
@needs_python
def test_keys_in_the_kernel_cannot_be_read_nor_left_for_the_next_sandbox():
    owner = subprocess.run([sys.executable, "-c", KEY_OWNER, KEY_THIEF], capture_output=True, text=True, check=False)
    if "no keyrings" in owner.stderr:
        pytest.skip("this machine has no keyrings to steal from")
    assert owner.returncode == 0, owner.stderr
    assert owner.stdout.count("['', '', -1]") == 2
    assert owner.stdout.count("PermissionError") == 2  # /proc/keys, which names them


@needs_bubblewrap
@needs_python
async def test_a_fork_bomb_stays_small_and_is_gone_afterwards():
    mark = mark_seconds()
    result = await python(
        f"""
        import os, sys
        made = 0
        while True:
            try:
                pid = os.fork()
            except OSError:
                print(made, flush=True)
                break
            if pid == 0:
                os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
            made += 1
        """,
        limits=SandboxLimits(processes=40),
        timeout_seconds=30,
    )
    assert 10 < int(result.stdout) < 40
    assert alive(mark) == []


@needs_bubblewrap
@needs_python
async def test_memory_is_limited():
    result = await python(
        """
        try:
            bytearray(1 << 30)
            print("GOT IT")
        except MemoryError:
            print("refused")
        """,
        limits=SandboxLimits(memory_bytes=256 << 20),
    )
    assert result.stdout == "refused\n"


@needs_bubblewrap
@needs_python
async def test_memory_is_limited_in_total_however_many_share_it():
    hoard = """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                held = bytearray(os.urandom(1 << 20)) * 60
                time.sleep(60)
        time.sleep(60)
    """
    limits = SandboxLimits(memory_bytes=1 << 30, total_memory_bytes=200 << 20)
    result = await python(hoard, limits=limits, timeout_seconds=60)
    assert (result.killed, result.timed_out, result.exit_code) == ("memory", False, 128 + signal.SIGKILL)
    share = """
        import os, time
        held = bytearray(os.urandom(1 << 20)) * 60
        for _ in range(6):
            os.fork() or time.sleep(1.5)
    """
    fine = await python(share, limits=limits, timeout_seconds=60)
    assert fine.killed is None, "pages that several processes share count once"


@needs_bubblewrap
@pytest.mark.parametrize("how", ["one long command", "many short ones"])
async def test_disk_is_limited_in_total_however_many_files_hold_it(how, monkeypatch):
    monkeypatch.setattr(sandbox, "DISK_LOOK_SECONDS", 0.3)
    fill = "head -c 3000000 /dev/zero > $(mktemp -p /app); sleep 0.05"
    async with Sandbox(limits=SandboxLimits(disk_bytes=20 << 20)) as box:
        if how == "one long command":
            killed = (await box.run(f"while :; do {fill}; done", timeout_seconds=60)).killed
        else:
            killed = next(filter(None, [(await box.run(fill)).killed for _ in range(60)]), None)
        assert killed == "disk"
        monkeypatch.setattr(sandbox, "DISK_LOOK_SECONDS", 60)  # there is time to make room
        assert (await box.run("rm -f /app/*; echo room")).stdout == "room\n"


@needs_bubblewrap
@pytest.mark.parametrize("place", ["/tmp/x", "/dev/shm/x"])
async def test_memory_cannot_be_had_as_files_either(place):
    result = await run_sandboxed(
        f"head -c 20000000 /dev/zero > {place}; wc -c < {place}", limits=SandboxLimits(tmp_bytes=1 << 20)
    )
    assert int(result.stdout) <= 1 << 20


@needs_bubblewrap
async def test_when_memory_runs_out_the_sandbox_goes_first_and_cannot_change_that():
    result = await run_sandboxed("echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj")
    assert result.stdout == "1000\n" and "Read-only" in result.stderr


@needs_bubblewrap
async def test_a_file_has_a_largest_size():
    result = await run_sandboxed("head -c 20000000 /dev/zero > x; wc -c < x", limits=SandboxLimits(file_bytes=1 << 20))
    assert int(result.stdout) <= 1 << 20


@needs_bubblewrap
@pytest.mark.parametrize("command", ["sleep {n}", "trap '' TERM INT HUP; sleep {n}", "sleep {n} & while :; do :; done"])
async def test_a_time_out_ends_everything_it_started(command):
    mark = mark_seconds()
    result = await run_sandboxed(command.format(n=mark), timeout_seconds=0.7)
    assert result.timed_out and result.exit_code == 128 + signal.SIGKILL and result.seconds < 10
    assert alive(mark) == []


@needs_bubblewrap
@needs_python
async def test_threads_on_all_processors_may_compute_until_the_time_limit(monkeypatch):
    """The kernel adds up the time of all threads of a process: on three processors, three seconds in each second."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    done = await python("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", timeout_seconds=29.5)
    assert done.stdout == "(93, 93)\n"


@needs_bubblewrap
async def test_what_was_printed_before_a_time_out_is_kept():
    result = await run_sandboxed("echo so far; sleep 100", timeout_seconds=1.0)
    assert result.timed_out and result.stdout == "so far\n"


@needs_bubblewrap
async def test_a_command_leaves_no_process_behind():
    mark = mark_seconds()
    result = await run_sandboxed(f"setsid nohup sleep {mark} >/dev/null 2>&1 & echo done")
    assert result.stdout == "done\n" and alive(mark) == []


@needs_bubblewrap
async def test_a_cancelled_command_is_gone_before_the_cancellation_returns():
    mark = mark_seconds()
    job = asyncio.ensure_future(run_sandboxed(f"sleep {mark}"))
    while not alive(mark):
        await asyncio.sleep(0.02)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert alive(mark) == []


@needs_bubblewrap
def test_the_sandbox_dies_with_its_launcher():
    mark = mark_seconds()
    start = f"asyncio.run(run_sandboxed(['sleep', '{mark}']))"
    code = f"import asyncio; from evsys_sandbox.sandbox import run_sandboxed; {start}"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        _wait_until(lambda: len(alive(mark)) >= 2)  # the launcher itself, and what it launched
    finally:
        launcher.kill()
        launcher.wait()
    _wait_until(lambda: alive(mark) == [])


@pytest.fixture
def open_folder():
    """A folder that a sandbox's uid can reach; pytest's own are closed to it."""
    folder = Path(tempfile.mkdtemp(prefix="evsys-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


HALF_MADE = """
import asyncio, sys
from evsys_sandbox import launch, sandbox
sandbox.why_unavailable = lambda: None
real = launch._tool
launch._tool = lambda name: sys.argv[1] if name == "bwrap" else real(name)
asyncio.run(sandbox.run_sandboxed(["true"]))
"""


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.skipif(os.name != "posix" or not os.path.exists("/proc/self/stat"), reason="needs Linux")
@pytest.mark.skipif(sandbox.shutil.which("setpriv") is None, reason="needs util-linux")
def test_what_has_not_yet_asked_to_die_with_its_parent_dies_with_the_launcher(open_folder, ended):
    """A bubblewrap that was killed in the middle of its start, held still: its inside has lost its parent."""
    mark = mark_seconds()
    half_made = open_folder / "bwrap"
    half_made.write_text(f"#!/bin/sh\nsetsid sh -c 'setsid sleep {mark} & sleep {mark}' &\nexec sleep {mark}\n")
    half_made.chmod(0o755)
    launcher = subprocess.Popen([sys.executable, "-c", HALF_MADE, str(half_made)])
    try:
        _wait_until(lambda: len(alive(mark)) >= 4)  # the shell, and its three sleeps
    finally:
        launcher.send_signal(ended)
        launcher.wait()
    _wait_until(lambda: alive(mark) == [] and alive(f"--launcher={launcher.pid}") == [])


LOOPING = """
import asyncio, sys
from evsys_sandbox.sandbox import run_sandboxed, why_unavailable
async def again(number):
    while True:
        await run_sandboxed(["sleep", sys.argv[1]], timeout_seconds=0.01 + 0.02 * number)
async def work():
    why_unavailable()
    print("ready", flush=True)
    await asyncio.gather(*map(again, range(3)))
asyncio.run(work())
"""


@needs_bubblewrap
@pytest.mark.parametrize("moment", [0.0, 0.01, 0.03, 0.06, 0.1, 0.3])
def test_a_launcher_that_is_killed_while_sandboxes_start_leaves_nothing(moment):
    """`perf/sandbox_kills.py` does this 300 times."""
    mark = mark_seconds()
    with subprocess.Popen([sys.executable, "-c", LOOPING, mark], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout.readline() == "ready\n"
            time.sleep(moment)
        finally:
            launcher.kill()
    _wait_until(lambda: alive(mark) == [] and alive(f"--launcher={launcher.pid}") == [])


@needs_bubblewrap
async def test_without_its_supervisor_a_command_fails_and_the_next_one_has_a_new_one():
    mark = mark_seconds()
    async with Sandbox() as box:
        job = asyncio.ensure_future(box.run(f"sleep {mark}"))
        while not alive(mark):
            await asyncio.sleep(0.02)
        [pid] = alive(f"--launcher={os.getpid()}")
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(SandboxError, match="was ended"):
            await job
        while alive(mark):
            await asyncio.sleep(0.02)
        assert (await box.run("echo again")).stdout == "again\n"


def _wait_until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


@needs_bubblewrap
async def test_a_flood_of_output_is_cut_and_does_not_hang():
    result = await run_sandboxed("yes", limits=SandboxLimits(output_bytes=10_000), timeout_seconds=20)
    assert len(result.stdout) == 10_000 and not result.timed_out


@needs_bubblewrap
async def test_output_beyond_the_limit_does_not_stop_a_command():
    result = await run_sandboxed(
        "head -c 50000 /dev/zero; echo end >&2; exit 4", limits=SandboxLimits(output_bytes=10_000)
    )
    assert (len(result.stdout), result.stderr, result.exit_code) == (10_000, "end\n", 4)


@needs_bubblewrap
async def test_fifty_at_once_all_run_under_uids_of_their_own():
    async def one(number: int) -> tuple[str, int]:
        async with Sandbox() as box:
            result = await box.run(f"sleep 0.3; echo {number}")
            return result.stdout.strip(), box._uid

    done = await asyncio.gather(*(one(number) for number in range(50)))
    assert [text for text, _ in done] == [str(number) for number in range(50)]
    if os.geteuid() == 0:
        assert len({uid for _, uid in done}) == 50


@needs_bubblewrap
async def test_a_sandbox_keeps_its_folders_and_nothing_else_between_commands():
    async with Sandbox(folders=("/app", "/logs/agent")) as box:
        await box.run("echo 1 > kept; echo 2 > /logs/agent/kept; echo 3 > /tmp/lost; mkdir sub; echo 4 > sub/deep")
        assert (await box.run("cat kept /logs/agent/kept; ls /tmp")).stdout == "1\n2\n"
        assert await box.list_files("/app") == ["kept", "sub/deep"]
        assert box.read("/app/sub/deep") == b"4\n"
        box.write("sub/new/file", "5", mode=0o755)
        assert (await box.run("sub/new/file || cat sub/new/file")).stdout == "5"
        place = box._place
    assert not place.exists()
    with pytest.raises(SandboxError, match="not open"):
        await box.run("true")


@needs_bubblewrap
async def test_many_commands_in_one_sandbox_can_overlap():
    async with Sandbox() as box:
        results = await asyncio.gather(*(box.run(f"echo {n} >> all; sleep 0.1") for n in range(12)))
        assert all(result.exit_code == 0 for result in results)
        assert sorted(map(int, box.read("all").split())) == list(range(12))


@needs_bubblewrap
async def test_a_link_laid_by_the_model_leads_nowhere(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden treasure")
    async with Sandbox() as box:
        await box.run(f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe")
        for path in ("link", "folder/secret.txt", "pipe"):
            with pytest.raises(SandboxError, match="not a plain file"):
                box.read(path)
            with pytest.raises(SandboxError, match="not a plain file"):
                box.write(path, "overwritten")
        with pytest.raises(SandboxError, match="none of the sandbox's folders"):
            box.read(f"../../..{secret}")
        with pytest.raises(SandboxError, match="none of the sandbox's folders"):
            box.write("/etc/passwd", "x")
        with pytest.raises(FileNotFoundError):
            box.read("missing")
        assert "link" not in await box.list_files("/app")
    assert secret.read_text() == "hidden treasure"


@needs_bubblewrap
async def test_a_folder_in_a_files_place_is_an_error_of_the_sandbox_and_can_be_removed(tmp_path):
    (tmp_path / "kept").touch()
    async with Sandbox() as box:
        await box.run(f"mkdir -p file/a; touch file/a/b; ln -s {tmp_path} file/link; chmod 0 file/a; touch other")
        with pytest.raises(SandboxError, match="file in the sandbox is not a plain file"):
            box.read("file")
        with pytest.raises(SandboxError, match="file in the sandbox is not a plain file"):
            box.write("file", "x")
        held = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
        assert not [path for path in held if path.endswith("/file")], "a handle is left open"
        box.remove("file")
        assert (await box.run("ls")).stdout == "other\n" and (tmp_path / "kept").exists()
        box.write("file", "x")
        assert box.read("file") == b"x"


@needs_bubblewrap
@needs_python
async def test_a_tree_as_deep_as_can_be_is_removed():
    async with Sandbox() as box:
        code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
        assert (await box.run([PYTHON, "-c", code])).exit_code == 0
        place = box._place
    assert not place.exists()


@needs_bubblewrap
async def test_two_sandboxes_do_not_see_each_other():
    async with Sandbox() as one, Sandbox() as other:
        await one.run("echo treasure > secret; chmod 777 . secret")
        result = await other.run(f"cat {one._place}/0/secret; ls /app /tmp")
        assert result.stdout.split() == ["/app:", "/tmp:"]


@needs_bubblewrap
async def test_what_a_killed_launcher_left_is_removed_and_what_is_in_use_is_not(monkeypatch, open_folder):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(open_folder))
    stale = open_folder / "evsys-sandbox-left"
    stale.mkdir()
    async with Sandbox() as live:
        long_ago = time.time() - 3600
        for place in (stale, live._place):
            os.utime(place, (long_ago, long_ago))
        sandbox._sweep_once.cache_clear()
        async with Sandbox():
            assert not stale.exists() and live._place.exists()
        assert (await live.run("echo still here")).stdout == "still here\n"


@pytest.fixture
def fresh_answer():
    why_unavailable.cache_clear()
    yield
    why_unavailable.cache_clear()


@pytest.mark.parametrize("tool", sandbox.TOOLS)
async def test_a_missing_tool_is_named_with_its_package_and_nothing_runs(tool, monkeypatch, tmp_path, fresh_answer):
    for name in sandbox.TOOLS:
        if name != tool:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sandbox, "PATH", str(tmp_path))
    ran = tmp_path / "ran"
    with pytest.raises(
        SandboxUnavailable, match=rf"{tool}, which is not installed: apt-get install {sandbox.TOOLS[tool]}"
    ):
        await run_sandboxed(f"touch {ran}")
    assert not ran.exists()


async def test_a_machine_that_forbids_it_is_told_what_to_allow(monkeypatch, fresh_answer):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name, path: name)
    fails = ["/bin/sh", "-c", "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1"]
    monkeypatch.setattr(sandbox, "outer_command", lambda uid: fails)
    with pytest.raises(SandboxUnavailable, match=r"No permissions.*user namespaces.*nothing is run without a sandbox"):
        await run_sandboxed("true")


@needs_bubblewrap
async def test_a_jail_that_cannot_be_built_is_an_error_and_no_result(monkeypatch):
    monkeypatch.setattr(sandbox, "TRIES", 2)
    with pytest.raises(SandboxError, match="did not start the command: bwrap: Can't chdir to /nowhere"):
        await run_sandboxed("true", cwd="/nowhere")


@needs_bubblewrap
@pytest.mark.parametrize("moment", [0.0, 0.005, 0.01, 0.02, 0.04])
async def test_a_time_out_while_bubblewrap_is_starting_leaves_nothing_and_comes_back(moment):
    mark = mark_seconds()
    results = await asyncio.gather(
        *(run_sandboxed(f"sleep {mark}", timeout_seconds=moment + 0.001 * index) for index in range(4))
    )
    assert all(result.timed_out for result in results)
    assert alive(mark) == []


async def test_links_to_the_files_of_tests_are_cut_and_others_are_not(monkeypatch):
    async with Sandbox(folders=("/app", "/tests", "/logs", "/logs/verifier")) as box:
        lay = (
            "cd /app; mkdir d src; touch 'd/a b'; ln -s /tests/x t; ln -s ../tests s; ln -s /dev/stdin i; "
            "ln -s /dev/fd/3 f; ln -s / r; ln -s r/tests/x by; ln -s loop loop; ln -s d/../../logs v; "
            "ln -s 'd/a b' own; ln -s ../d src/d; ln -s /usr/bin/env env; ln -s /dev/stdout out; ln -s /dev/null null; "
            "ln -s nothing dangling; ln -s ../tests/x src/x; ln -s c0 c1; ln -s d c0; "
            "for i in $(seq 2 60); do ln -s c$((i-1)) c$i; done"
        )
        await box.run(lay)
        await box.cut_links("/logs/verifier")
        left = (await box.run("find /app -type l -printf '%P '")).stdout.split()
        chain = [f"c{number}" for number in range(40)]  # c39 is the fortieth link, as many as the kernel follows
        assert sorted(left) == sorted(["own", "src/d", "src/x", "env", "out", "null", "dangling", *chain])
        monkeypatch.setattr("evsys_sandbox.sandbox.CUT_LINKS_SECONDS", 0.0)
        await box.cut_links("/logs/verifier")
        assert (await box.run("find /app -type l")).stdout == ""


async def test_what_was_set_aside_comes_back():
    async with Sandbox() as box:
        await box.run(
            "mkdir -p .config/git .config/mine; touch .bashrc .profile plain; ln -s plain .link; ln -s / linked"
        )
        before = (await box.run("find . | sort")).stdout
        box.set_aside("/app/.config", lambda name: name == "git")
        box.set_aside("/app", lambda name: name in (".config", ".bashrc", ".link"))
        box.set_aside("/app/linked/etc", lambda name: True)
        box.set_aside("/app/nothing", lambda name: True)
        assert (await box.run("find . | sort")).stdout.split() == [".", "./.profile", "./linked", "./plain"]
        box.bring_back()
        assert (await box.run("find . | sort")).stdout == before
        box.set_aside("/app", lambda name: name == ".bashrc")
        await box.run("echo new > .bashrc")
        box.bring_back()
        assert box.read(".bashrc") == b"new\n"
