"""Run commands of a model where they can do no harm: bubblewrap, hardened, without Docker.

In: a command and files. Out: a `SandboxResult`. `run_sandboxed` is one command in a new directory; a `Sandbox`
keeps its directories over many commands. No network, no host files but a read-only /usr, a uid that nothing else has,
limits on memory, disk, processes, files and time, and of the kernel's calls those of `seccomp` refused; whatever
is started dies with the command. Where that cannot be had, `SandboxUnavailable` says so: nothing is ever run outside.
The kernel is shared: right for the code of a model of your own, not for hostile strangers (e2b, daytona, modal).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Literal, Self

from evsys_sandbox.errors import SandboxError, SandboxUnavailable
from evsys_sandbox.grading import GRADER_HOME, OWN, PYTHON_FOLDER, SITECUSTOMIZE
from evsys_sandbox.landlock import AGENTS_HOME
from evsys_sandbox.launch import (
    PATH,
    SandboxLaunch,
    SandboxLimits,
    Tracing,
    memory_file,
    outer_command,
    why_not_traced,
)
from evsys_sandbox.links import follow, is_of_tests, read_target
from evsys_sandbox.seccomp import seccomp_filter
from evsys_sandbox.uids import UidLease, hold

HOME = "/app"
BIN = f"{OWN}/bin"
"""Programs under names that this machine does not have them under."""
PREFIX = "evsys-sandbox-"
NEVER = "nothing is run without a sandbox"
TOOLS = {"bwrap": "bubblewrap", "setpriv": "util-linux"}
TRIES = 6
DISK_LOOK_SECONDS = 0.25
"""Between two looks at how much disk a sandbox uses, counted in time that its commands run."""
DISK_LOOK_SHARE, DISK_LOOK_MOST_SECONDS = 0.05, 2.0
"""A look at many files takes long: this share of the time goes into looks, with pauses of at most so long."""
CUT_LINKS_SECONDS = 30.0
"""How long looks at the agent's links may take before all of them are removed."""
DISK_WALK_SECONDS = 10.0
"""A tree that takes longer to add up has too many files."""
# What programs want to read of /etc; passwords, keys and host names are not among it.
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
# LeakSanitizer works by ptrace, which is refused, and would fail every program built with it.
NO_PTRACE = {"ASAN_OPTIONS": "detect_leaks=0", "LSAN_OPTIONS": "detect_leaks=0"}
DEFAULT_ACL = "system.posix_acl_default"
OWN_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{home}:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What became of one command."""

    exit_code: int
    """128 + n when signal n ended it."""
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    killed: Literal["memory", "disk", "forgery"] | None = None
    """Which limit, of all processes together, it was killed for; `forgery`: a link led tests to the folder of their
    reward, and the last line of `stderr` says by which name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a command sees the folders, where that is not as they are."""

    read_only: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    """In the place of these there are empty ones, gone with the command."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Files that show another file of the sandbox, by path; they cannot be changed, moved or removed."""
    home: str | None = None
    """The home of tests, for programs that they start without `HOME` (`env -i`): such programs ask the list of users,
    which else names /app. Python finds its start file (`grading`) without variables then, too, where the
    system's own start file is a link into /etc, as on Debian."""
    tracing: Tracing | None = None
    """How the programs that the command starts are kept apart; where this machine cannot, they are not, and the log
    says so once."""


EVERYTHING = View()


async def run_sandboxed(
    command: str | Sequence[str],
    *,
    files: Mapping[str, str | bytes] | None = None,
    timeout_seconds: float = 60.0,
    cwd: str = HOME,
    env: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """One command in a new sandbox; relative names in `files` lie in /app, and all is gone afterwards."""
    folders = dict.fromkeys([HOME, *("/" + PurePosixPath(HOME, name).parts[1] for name in files or {})])
    async with Sandbox(folders=tuple(folders), limits=limits or SandboxLimits()) as box:
        for name, content in (files or {}).items():
            box.write(name, content)
        return await box.run(command, timeout_seconds=timeout_seconds, cwd=cwd, env=env)


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """Directories that live on between commands; every command is a fresh jail around them.

    Commands may overlap. What one leaves running is killed when it ends; only `folders` outlive it.
    """

    folders: tuple[str, ...] = (HOME,)
    """Where commands may write and find it again; the first is home. A folder /tmp replaces the one that is emptied."""
    read_only: tuple[str, ...] = ()
    """Those of the folders that only `write` can change."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of programs: `{"python3.9": "/usr/bin/python3"}`. `python` is there in any case."""
    _lease: UidLease = field(default_factory=UidLease, init=False)
    _uid: int = field(default=-1, init=False)
    _base: Path | None = field(default=None, init=False)
    _held: int | None = field(default=None, init=False)
    """Keeps the directory from being taken for one whose owner died."""
    _live: set[SandboxLaunch] = field(default_factory=set, init=False)
    _unlooked_seconds: float = field(default=0.0, init=False)
    """How long commands have run since the disk was looked at."""
    _aside: list[tuple[str, str, Path]] = field(default_factory=list, init=False)
    """What was set aside: its folder, its name, and where it is."""
    _look_seconds: float = field(default=0.0, init=False)
    """What the last look took."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Make the directories and take a uid; `SandboxUnavailable` where there can be no sandbox."""
        reason = await asyncio.to_thread(why_unavailable)
        if reason is not None:
            raise SandboxUnavailable(reason)
        await asyncio.to_thread(_sweep_once)
        self._uid = self._lease.__enter__()
        try:
            self._make_base()
        except OSError as exc:
            await self.close()
            raise SandboxError(f"the sandbox's directory cannot be made: {exc}") from exc

    def _make_base(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._held = hold(self._base)
        # Another uid than ours has to pass through to its folders, and needs no list of what is there.
        self._base.chmod(0o711)
        for name, text in OWN_ETC.items():
            (self._base / name).write_text(text.format(home=HOME))
            (self._base / name).chmod(0o644)
        (self._base / "python").mkdir(mode=0o755)
        (self._base / "python" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        (self._base / "python" / "sitecustomize.py").chmod(0o644)
        for index in range(len(self.folders)):
            place = self._base / str(index)
            place.mkdir(mode=0o700)
            self._give(place)

    async def close(self) -> None:
        """End what runs, then remove the directories and give the uid back."""
        base, self._base = self._base, None
        await asyncio.gather(*(launch.end() for launch in list(self._live)))
        if base is not None:
            await asyncio.to_thread(_remove, base)
        if self._held is not None:
            os.close(self._held)
            self._held = None
        self._lease.__exit__()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_seconds: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        view: View = EVERYTHING,
    ) -> SandboxResult:
        """Run a command (a text is for the shell). Time-out and cancellation kill all that it started."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        begin, attempt = time.monotonic(), 1
        jail = self._jail(cwd or self.folders[0], env or {}, view)
        tracing = view.tracing
        if tracing is not None and not await asyncio.to_thread(_can_trace):
            tracing = None
        launch = await self._launch(argv, jail, timeout_seconds, tracing)
        while not launch.started:
            if attempt == TRIES:
                raise SandboxError(f"bubblewrap did not start the command: {launch.stderr.strip() or launch.exit_code}")
            # The kernel counts a uid's dying namespaces for a moment longer; the command itself has not run.
            await asyncio.sleep(0.01 * 2**attempt)
            attempt += 1
            launch = await self._launch(argv, jail, timeout_seconds, tracing)
        return SandboxResult(
            exit_code=launch.exit_code,
            stdout=launch.stdout,
            stderr=launch.stderr,
            seconds=time.monotonic() - begin,
            timed_out=launch.timed_out,
            killed=launch.killed,
        )

    async def _launch(self, argv: list[str], jail: list[str], seconds: float, tracing: Tracing | None) -> SandboxLaunch:
        launch = SandboxLaunch(self._uid)
        self._live.add(launch)
        begin = time.monotonic()
        disk = asyncio.ensure_future(self._limit_disk(launch))
        try:
            await launch.run(jail, argv, limits=self.limits, seconds=seconds, tracing=tracing)
        finally:
            self._live.discard(launch)
            disk.cancel()
        # Many short commands must not fill the disk between the looks that a long one gets.
        self._unlooked_seconds += time.monotonic() - begin
        if self._unlooked_seconds > self._look_pause and await self._is_disk_full():
            launch.killed = launch.killed or "disk"
        return launch

    async def _limit_disk(self, launch: SandboxLaunch) -> None:
        while True:
            await asyncio.sleep(self._look_pause)
            if await self._is_disk_full():
                launch.end_soon(because="disk")

    @property
    def _look_pause(self) -> float:
        return max(DISK_LOOK_SECONDS, min(DISK_LOOK_MOST_SECONDS, self._look_seconds / DISK_LOOK_SHARE))

    async def _is_disk_full(self) -> bool:
        self._unlooked_seconds, begin = 0.0, time.monotonic()
        add_up = ["/usr/bin/du", "-sx", "--block-size=1", str(self._place)]
        try:
            asked = await asyncio.to_thread(
                subprocess.run, add_up, capture_output=True, text=True, timeout=DISK_WALK_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True  # too many files to tell
        finally:
            self._look_seconds = time.monotonic() - begin
        # Whatever the exit code: it is 1 where a file vanished during the walk, and the sum is there all the same.
        return bool(asked.stdout) and int(asked.stdout.split()[0]) > self.limits.disk_bytes

    async def hand_over(self) -> None:
        """Another uid has the folders from now on, with all that is in them; nothing may be running.

        Where we are not root there is only one uid. Folders and files that were closed to their owner are opened, and
        so are those that will be made: by a default ACL of a folder, tests could not read the log that they write.
        """
        await asyncio.gather(*(launch.end() for launch in list(self._live)))
        lease = UidLease()
        # Before the old lease ends, so that the new uid is another one.
        uid, base = lease.__enter__(), str(self._place)
        self._lease.__exit__()
        self._lease, self._uid = lease, uid
        folders = [f"{base}/{index}" for index in range(len(self.folders))]
        change = [["/bin/chmod", "-R", "u+rwX"]]
        if os.geteuid() == 0:
            change.insert(0, ["/bin/chown", "-hR", f"{uid}:{uid}"])
        for command in change:
            await asyncio.to_thread(subprocess.run, [*command, *folders], check=False, capture_output=True)
        await asyncio.to_thread(_forget_default_rights, folders)

    async def empty(self, folder: str) -> None:
        """Remove everything in one of the folders."""
        place = self._place / str(self.folders.index(folder))
        await asyncio.to_thread(_remove, place)
        place.mkdir(mode=0o700)
        self._give(place)

    async def cut_links(self, guarded: str) -> None:
        """Remove links that lead to the files of tests (`links.is_of_tests`); nothing may be running.

        Where that takes too long, because there are very many links, all of them are removed.
        """
        await asyncio.to_thread(self._cut_links, guarded)

    def _cut_links(self, guarded: str) -> None:
        places = {str(self._place / str(index)): folder for index, folder in enumerate(self.folders)}
        find = ["/usr/bin/find", *places, "-type", "l"]
        limit = time.monotonic() + CUT_LINKS_SECONDS

        def read(path: str) -> str | None:
            with contextlib.suppress(SandboxError):
                top, parts = self._locate(path)
                return read_target(str(top.joinpath(*parts)))
            # What the machine lends; it has no links of the agent's, but may have one that leads back.
            return read_target(path) if path.startswith(("/usr/", "/bin", "/sbin", "/lib", "/etc/")) else None

        try:
            listed = subprocess.run(
                [*find, "-print0"], capture_output=True, check=False, timeout=CUT_LINKS_SECONDS
            ).stdout.split(b"\0")[:-1]
            leading = []
            for link in map(os.fsdecode, listed):
                if time.monotonic() > limit:
                    raise TimeoutError
                place = next(each for each in places if link.startswith(f"{each}/"))
                if is_of_tests(follow(places[place] + link.removeprefix(place), read), guarded):
                    leading.append(link)
            for link in leading:  # when all have been followed: without one, another would seem to lead nowhere
                os.unlink(link)  # not through another link: `find` follows none
        except (subprocess.TimeoutExpired, OSError):  # among them a name that is longer than a path can be
            subprocess.run([*find, "-delete"], check=False, capture_output=True)

    def set_aside(self, folder: str, is_taken: Callable[[str], bool]) -> None:
        """Take entries of certain names out of a folder, until `bring_back`; nothing may be running. A folder that is
        not there, or is a link, has none."""
        aside = self._place / "aside"
        aside.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as opened, contextlib.suppress(FileNotFoundError, SandboxError):
            for name in os.listdir(here := self._open_folder(folder, opened)):
                if is_taken(name):
                    place = aside / str(len(self._aside))
                    os.rename(name, place, src_dir_fd=here)
                    self._aside.append((folder, name, place))

    def bring_back(self) -> None:
        """Put back what was set aside, where its place is free."""
        for folder, name, place in reversed(self._aside):  # a folder before what was taken out of it
            with ExitStack() as opened, contextlib.suppress(FileNotFoundError, SandboxError):
                here = self._open_folder(folder, opened)
                if name not in os.listdir(here):
                    os.rename(place, name, dst_dir_fd=here)
        self._aside.clear()
        _remove(self._place / "aside")

    def _open_folder(self, folder: str, opened: ExitStack) -> int:
        place, parts = self._locate(f"{folder}/x")
        here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, here)
        for part in parts[:-1]:
            here = self._open_at(folder, part, os.O_RDONLY | os.O_DIRECTORY, here)
            opened.callback(os.close, here)
        return here

    def remove(self, path: str) -> None:
        """Remove a file, if it is there, or a folder in its place with all that is in it."""
        place, parts = self._locate(path)
        with ExitStack() as opened:
            here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, here)
            try:
                for part in parts[:-1]:
                    here = self._open_at(path, part, os.O_RDONLY | os.O_DIRECTORY, here)
                    opened.callback(os.close, here)
                os.unlink(parts[-1], dir_fd=here)
            except (FileNotFoundError, SandboxError):
                return
            except IsADirectoryError:
                # Out of the model's reach first: `rm` and `chmod` go by paths.
                aside = Path(tempfile.mkdtemp(dir=self._place))
                opened.callback(_remove, aside)
                try:
                    os.rename(parts[-1], aside / "removed", src_dir_fd=here)
                except OSError as exc:
                    raise SandboxError(f"{path} in the sandbox is a folder and cannot be removed: {exc}") from exc

    def write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Put a file into one of the folders (a relative path is below the first); its directories are made."""
        data = content.encode(errors="replace") if isinstance(content, str) else content
        with self._open_inside(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            self._give(file.fileno())
            file.write(data)
            os.fchmod(file.fileno(), mode)

    def read(self, path: str, *, limit_bytes: int = 64 << 20, is_cut: bool = False) -> bytes:
        """A file out of one of the folders; FileNotFoundError when it is not there. One that is longer than the limit
        is refused, or cut there (`is_cut`)."""
        with self._open_inside(path, os.O_RDONLY) as file:
            data = file.read(limit_bytes + 1)
        if is_cut:
            return data[:limit_bytes]
        if len(data) > limit_bytes:
            raise SandboxError(f"{path} is larger than the {limit_bytes} bytes that may be read")
        return data

    async def list_files(self, folder: str) -> list[str]:
        """The plain files below a folder, relative to it; links are left out."""
        found = await self.run(["find", folder, "-type", "f", "-printf", "%P\\0"], cwd="/")
        if found.exit_code != 0:
            raise FileNotFoundError(f"{folder}: {found.stderr.strip()}")
        if len(found.stdout) >= self.limits.output_bytes:
            raise SandboxError(f"{folder} in the sandbox holds more files than can be listed")
        return sorted(name for name in found.stdout.split("\0") if name)

    @contextmanager
    def _open_inside(self, path: str, flags: int) -> Iterator[IO[bytes]]:
        """The file, reached step by step without following links: the model may have laid them to host files."""
        place, parts = self._locate(path)
        with ExitStack() as opened:
            here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, here)
            for part in parts[:-1]:
                if flags & os.O_CREAT:
                    self._make_folder(part, here)
                here = self._open_at(path, part, os.O_RDONLY | os.O_DIRECTORY, here)
                opened.callback(os.close, here)
            # O_NONBLOCK: a pipe laid in the file's place must not make us wait.
            handle = self._open_at(path, parts[-1], flags | os.O_NONBLOCK, here)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise SandboxError(f"{path} in the sandbox is not a plain file")
            yield opened.enter_context(os.fdopen(handle, "wb" if flags & os.O_WRONLY else "rb"))

    def _open_at(self, path: str, part: str, flags: int, parent: int) -> int:
        try:
            return os.open(part, flags | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not in the sandbox") from None
        except OSError as exc:  # a link (ELOOP), a pipe without a reader (ENXIO), a file where a folder should be
            raise SandboxError(f"{path} in the sandbox is not a plain file: {exc.strerror}") from exc

    def _make_folder(self, name: str, parent: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
            if os.geteuid() == 0:
                os.chown(name, self._uid, self._uid, dir_fd=parent, follow_symlinks=False)

    def _give(self, place: Path | int) -> None:
        if os.geteuid() == 0:
            os.chown(place, self._uid, self._uid)

    def _locate(self, path: str) -> tuple[Path, tuple[str, ...]]:
        whole = PurePosixPath(self.folders[0], path)
        # The innermost one: a folder may lie in another.
        for index, folder in sorted(enumerate(self.folders), key=lambda one: -len(one[1])):
            if whole.is_relative_to(folder) and ".." not in whole.parts and whole != PurePosixPath(folder):
                return self._place / str(index), whole.relative_to(folder).parts
        raise SandboxError(f"{path} is in none of the sandbox's folders: {', '.join(self.folders)}")

    @property
    def _place(self) -> Path:
        if self._base is None:
            raise SandboxError("this sandbox is not open")
        return self._base

    def _jail(self, cwd: str, env: Mapping[str, str], view: View) -> list[str]:
        """bubblewrap's own arguments: everything that can be seen from inside."""
        size = str(self.limits.tmp_bytes)
        args = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        args += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
        args += ["--ro-bind", "/usr", "/usr", *_root_links(), "--proc", "/proc", "--dev", "/dev"]
        if os.path.exists("/proc/keys"):  # it lists the host's
            args += ["--ro-bind", "/dev/null", "/proc/keys"]
        # Nothing there is to be written: neither another process's memory nor its own place in the OOM killer's list.
        args += ["--remount-ro", "/proc"]
        # /dev is a tmpfs without a limit: nothing may be put there.
        args += ["--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp"]
        users = "passwd"
        if view.home is not None:
            users = "passwd-of-tests"
            (self._place / users).write_text(OWN_ETC["passwd"].format(home=view.home))
            (self._place / users).chmod(0o644)
            for place in _python_start_files():
                args += ["--ro-bind", str(self._place / "python" / "sitecustomize.py"), place]
        for name in OWN_ETC:
            args += ["--ro-bind", str(self._place / (users if name == "passwd" else name)), f"/etc/{name}"]
        for name in ETC:
            args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        # Outer folders first, so that one that lies in another is not hidden by it.
        for folder, index in sorted((folder, index) for index, folder in enumerate(self.folders)):
            bind = "--ro-bind" if folder in self.read_only or folder in view.read_only else "--bind"
            if folder in view.emptied:
                args += ["--size", size, "--tmpfs", folder]
            else:
                args += [bind, str(self._place / str(index)), folder]
        for place, shown in view.pinned.items():
            top, parts = self._locate(shown)
            args += ["--ro-bind", str(top.joinpath(*parts)), place]
        args += ["--ro-bind", str(self._place / "python"), PYTHON_FOLDER, "--size", size, "--tmpfs", GRADER_HOME]
        args += ["--size", size, "--tmpfs", AGENTS_HOME]
        for name, program in {**_own_aliases(), **self.aliases}.items():
            args += ["--symlink", program, f"{BIN}/{name}"]
        # Last: until here bubblewrap had to make its mount points in the root directory.
        args += ["--remount-ro", "/", "--chdir", cwd, "--clearenv"]
        variables = {"HOME": self.folders[0], "LANG": "C.UTF-8", "USER": "user", **NO_PTRACE, **env}
        # Our aliases come last: they hide no program of the machine.
        variables["PATH"] = f"{env.get('PATH', PATH)}:{BIN}"
        return args + [word for name, value in variables.items() for word in ("--setenv", name, value)]


@cache
def why_unavailable() -> str | None:
    """Why there is no sandbox on this machine, with what to do about it; None where there is one. Found out once."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux and bubblewrap, and this is {sys.platform}: set E2B_API_KEY; {NEVER}"
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=PATH) is None:
            return f"the sandbox needs {tool}, which is not installed: apt-get install {package}; {NEVER}"
    jail = ["--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/usr", "/usr", *_root_links()]
    try:
        with UidLease() as uid, memory_file(seccomp_filter()) as refused:
            jail += ["--proc", "/proc", "--dev", "/dev", "--seccomp", str(refused)]
            argv = [*outer_command(uid), *jail, "/bin/true"]
            tried = subprocess.run(
                argv, capture_output=True, text=True, env={}, timeout=60, check=False, pass_fds=(refused,)
            )
        if tried.returncode == 0:
            return None
        said = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
    except (SandboxError, OSError, subprocess.SubprocessError) as exc:
        said = str(exc)
    return (
        f"bubblewrap cannot make a sandbox here ({said}): allow user namespaces (sysctl user.max_user_namespaces, and "
        f"kernel.unprivileged_userns_clone=1 where it exists) or set E2B_API_KEY; {NEVER}"
    )


@cache
def _can_trace() -> bool:
    why = why_not_traced()
    if why is not None:
        logging.getLogger("evsys_sdk.sandbox").warning(
            "A program that the tests of a task start can reach the tests' open files, and its background processes "
            'outlive it, because %s. See "What a reward can be trusted for" in docs/rollouts.md.',
            why,
        )
    return why is None


@cache
def _own_aliases() -> dict[str, str]:
    """`python`, on machines that know it as `python3` only: tasks are written for images that have both."""
    python = shutil.which("python3", path=PATH)
    return {"python": python} if python and shutil.which("python", path=PATH) is None else {}


@cache
def _python_start_files() -> tuple[str, ...]:
    """Files in /etc that the Pythons of this machine run at their start, whatever their variables and options."""
    links = [place for place in Path("/usr/lib").glob("python3*/sitecustomize.py") if place.is_symlink()]
    return tuple(target for target in map(os.readlink, links) if target.startswith("/etc/"))


@cache
def _root_links() -> tuple[str, ...]:
    """/bin, /lib and the like, as this machine has them: links into /usr, or their own directories."""
    args: list[str] = []
    for place in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if place.is_symlink():
            args += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            args += ["--ro-bind", str(place), str(place)]
    return tuple(args)


@cache
def _sweep_once() -> None:
    """Remove what sandboxes left whose process was killed; a live one holds its directory."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # A younger one may have been made and not be held yet.
            if time.time() - place.stat().st_mtime > 60 and (handle := hold(place, alone=True)) is not None:
                _remove(place)
                os.close(handle)


def _forget_default_rights(folders: Sequence[str]) -> None:
    listed = subprocess.run(
        ["/usr/bin/find", *folders, "-type", "d", "-print0"], capture_output=True, check=False
    ).stdout
    for folder in listed.split(b"\0")[:-1]:
        with contextlib.suppress(OSError):  # it has none, mostly
            os.removexattr(folder, DEFAULT_ACL, follow_symlinks=False)


def _remove(base: Path) -> None:
    # Not shutil.rmtree: a tree as deep as a model can make it ends in a RecursionError.
    if os.geteuid() != 0:  # folders that the model closed to itself
        subprocess.run(["/bin/chmod", "-R", "u+rwX", str(base)], check=False, capture_output=True)
    subprocess.run(["/bin/rm", "-rf", "--one-file-system", str(base)], check=False, capture_output=True)
