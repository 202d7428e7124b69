"""Keep the programs that a test starts away from the test: the process tree of one sandbox, traced by ptrace.

In: a way to start a command. Out: its exit code. Tests start programs of the model, and those have the tests' own uid.
Four things are done to every program that is started inside, whichever program starts it:

- It enters a new Landlock domain before its first instruction. The kernel then refuses it what `ptrace` would
  allow on every process that is not its own descendant: `/proc/PID/fd` (the pipes of the tests), `mem`, `environ`.
- If it runs code of the agent (`code_origin`), that domain forbids it to write in the guarded folder, where the tests'
  reward belongs. What starts below it inherits that. It gets a home that is not the tests', and the files that it
  inherits opened anew.
- When it ends, the processes that descend from it are killed, daemons too, before its parent learns that it has ended.
  Nothing that it left in the background can change a file that the test compares afterwards. The kernel tells a
  tracer of a death first, and the parent when the tracer has reaped, so there is no moment in between.

- Where a program of the tests opens a file to write, or a folder, and a link leads it into the guarded folder, or
  where it moves, copies or unpacks a link to files of the tests, the reward is forged (`links`): everything ends.

Only forks, executions, deaths and such opens stop a process: other system calls run at full speed. A process cannot
leave: `seccomp` refuses CLONE_UNTRACED, and the tracer's death kills everything (PTRACE_O_EXITKILL). Part of
`supervisor`, and like it without imports of evsys_sdk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import stat
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from evsys_sandbox.code_origin import Execution, is_agents, names_folder, runs_agents_code, takes_names_from_files
from evsys_sandbox.landlock import (
    MOST_DOMAINS,
    change_home,
    confine,
    exchanged_handles,
    landlock_version,
    lower_file_limit,
    writable_places,
)
from evsys_sandbox.links import (
    ENTERS,
    OpenedName,
    RewardForged,
    follow,
    has_arrived,
    is_forged,
    leading_link,
    read_name,
    read_target,
)
from evsys_sandbox.ptrace import (
    CONT,
    EVENT_CLONE,
    EVENT_EXEC,
    EVENT_FORK,
    EVENT_SECCOMP,
    EVENT_STOP,
    EVENT_VFORK,
    GROUP_STOPS,
    LISTEN,
    MACHINES,
    OPTIONS,
    SEIZE,
    SYSCALL,
    SYSCALL_STOP,
    WALL,
    TracingFailed,
    event_message,
    get_registers,
    libc,
    ptrace,
    read_link,
    read_status,
    read_text,
    set_registers,
    tracees,
)
from evsys_sandbox.seccomp import EXECUTIONS, PLACES, SCHEDULES, TRACED

PR_SET_NO_NEW_PRIVS = 38
UNCLAIMED_SECONDS, UNCLAIMED_MOST_SECONDS = 1.0, 60.0
"""How long a new process waits for the report of its birth, before and after which it is asked whether its parent was
killed before it could give one. On a machine with much to do, a healthy parent can take seconds."""
UNCLAIMED_LOOK_SECONDS = 0.02
"""Between two looks for such processes; a look reads the state of every process that is traced."""
STUCK_SECONDS, ALARM_SECONDS = 30.0, 0.1
"""After so long without progress, where the kernel needs milliseconds, the tracer ends, and everything with it."""

AT_EXECFN = 31  # linux/auxvec.h
NO_PROCESS = 2**31 - 1
"""More than the kernel's largest number of a process, or of a kind of number."""
RENAMES = ("rename", "renameat", "renameat2")
LAYS = ("symlink", "symlinkat", "link", "linkat")


class TracerStuck(Exception):
    """Something that must happen soon does not happen. The tracer ends, and PTRACE_O_EXITKILL kills all it follows."""


@dataclass(frozen=True)
class ProgramOrigin:
    """What a program is that begins; the names are those of `Program`."""

    is_agents: bool = False
    is_copier: bool = False
    is_confined: bool = False
    is_ln: bool = False


@dataclass(eq=False)
class Program:
    """What was started by one execution: a process, and all that descend from it."""

    root: int
    parent: Program | None = None
    is_agents: bool = False
    """The program runs code of the agent, and cannot write in the guarded folder."""
    is_copier: bool = False
    """The program makes files and links whose names and targets are written in other files (`code_origin`). One of the
    tests cannot write in the guarded folder either, unless its command line names it."""
    is_confined: bool = False
    """The program cannot write in the guarded folder."""
    is_ln: bool = False
    """The program is `ln`, which lays links."""
    domains: int = 0
    """In how many Landlock domains the program is."""
    is_over: bool = False
    """What is left of it is being killed."""
    processes: set[int] = field(default_factory=set)
    """Alive, those of programs that it started not among them."""
    visited: set[str] = field(default_factory=set)
    """The program's working directories, as far as they are in the guarded folder or above it."""

    def is_below(self, other: Program) -> bool:
        above: Program | None = self
        while above is not None and above is not other:
            above = above.parent
        return above is other


@dataclass
class Task:
    """A thread."""

    process: int
    program: Program


class Tracer:
    """Follows one command to its end."""

    def __init__(self, *, kills_strays: bool, landlock_version: int, guarded: str | None = None) -> None:
        self.kills_strays, self.landlock_version, self.guarded = kills_strays, landlock_version, guarded
        self.machine = MACHINES[platform.machine()]
        self.tasks: dict[int, Task] = {}
        self.programs: set[Program] = set()
        self.waiting: dict[int, float] = {}
        """New threads that have stopped before their birth was reported, and since when."""
        self.newborn: set[int] = set()
        """Threads whose birth was reported, and that have not stopped for the first time."""
        self.executing: dict[int, str] = {}
        """Threads that are inside a call that executes, and the file."""
        self.opening: dict[int, OpenedName | tuple[str, list[int]]] = {}
        """Threads that are inside a call that opens, enters, lays a link or moves: what it names, or its arguments."""
        self.put_off: list[int] = []
        """Signals to send again to a program that has not begun."""
        self.guarded_handle: int | None = None
        """The guarded folder, open from the start of the agent's first program."""
        self.next_look = 0.0
        self.limit: tuple[float, str] | None = None
        """Until when the present wait must be over, and what for it is."""

    def run(self, start: Callable[[], None], *, given_away: Sequence[int] = ()) -> int:
        """Start a command in a new process (`start` does not return) and follow it; its exit code. The files
        that are `given_away` are closed here."""
        read, write = os.pipe()
        root = os.fork()
        if root == 0:
            os.close(write)
            os.read(read, 1)
            os.close(read)
            start()
        for handle in (read, *given_away):
            os.close(handle)
        program = Program(root, processes={root})
        self.programs.add(program)
        self.tasks[root] = Task(root, program)
        ptrace(SEIZE, root, 0, OPTIONS)
        os.write(write, b"x")
        os.close(write)
        signal.signal(signal.SIGALRM, self._check_limit)
        signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS, ALARM_SECONDS)
        try:
            return self._follow(root)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _follow(self, root: int) -> int:
        while True:
            # Without a limit only here, where the command itself may take long: the launcher ends it after its time.
            at_once = os.WNOHANG if self.waiting else 0
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT | WALL | at_once)
            if found is None:
                self._kill_unclaimed()
                time.sleep(0.001)
            elif found.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                self._bury(found.si_pid)
                if found.si_pid == root:
                    return found.si_status + (0 if found.si_code == os.CLD_EXITED else 128)
            else:
                # Only a stop: were it dead by now, reaping it here would tell its parent too early.
                taken = os.waitid(os.P_PID, found.si_pid, os.WSTOPPED | os.WNOHANG | WALL)
                if taken is not None:
                    with contextlib.suppress(ProcessLookupError):  # killed meanwhile; its death comes next
                        self._handle_stop(taken.si_pid, taken.si_status)

    def _handle_stop(self, tid: int, status: int) -> None:
        event, number = status >> 8, status & 0xFF
        if event in (EVENT_FORK, EVENT_VFORK, EVENT_CLONE):
            self._add_task(event_message(tid), parent=self.tasks[tid])
            ptrace(CONT, tid)
        elif event == EVENT_SECCOMP:
            call = TRACED[event_message(tid)]
            if call in SCHEDULES:
                self._keep_schedule(tid, call)
                return
            is_opening, program = call not in EXECUTIONS, self.tasks[tid].program
            # Landlock keeps a program of the agent out of the guarded folder. New links are looked at where a program
            # takes them from other files; a script of the tests that lays one knows where it leads, and so does `ln`,
            # which lays it under another name and moves it.
            is_own = program.is_agents or call in LAYS or (call in PLACES and program.is_ln)
            if is_opening and is_own and not (call in PLACES and program.is_copier):
                ptrace(CONT, tid)
                return
            try:
                registers = get_registers(tid, self.machine)
            except TracingFailed:
                os.kill(tid, signal.SIGKILL)
                return
            arguments = [registers[place] for place in self.machine.arguments]
            if not is_opening:
                # `execveat` has a folder before the file.
                self.executing[tid] = read_text(tid, arguments[EXECUTIONS.index(call)])
                ptrace(SYSCALL, tid)
                return
            # What is opened is read only where it turns out to matter; a program that enters a folder is in another
            # one then.
            self.opening[tid] = read_name(tid, call, arguments) if call in ENTERS else (call, arguments)
            ptrace(SYSCALL, tid)
        elif event == EVENT_EXEC:
            former = event_message(tid)  # another thread than the first has taken over the first one's number
            self.executing.pop(former, None)
            self.executing.pop(tid, None)
            if former != tid:
                task = self.tasks.pop(former, None)
                self.tasks[tid] = Task(tid, task.program) if task is not None else self.tasks[tid]
            self._begin_program(tid, self._origin(tid))
        elif number == SYSCALL_STOP and tid in self.opening:
            self._check_opening(tid, self.opening.pop(tid), get_registers(tid, self.machine)[self.machine.result])
            ptrace(CONT, tid)
        elif number == SYSCALL_STOP and tid in self.executing:  # and it has failed
            file, result = self.executing.pop(tid), get_registers(tid, self.machine)[self.machine.result]
            # Bash reads a file that has no `#!` line itself, in the process that was to become the program.
            if result == 2**64 - errno.ENOEXEC and is_agents(file, read_link(f"/proc/{tid}/cwd")):
                is_guarded = self.guarded is not None
                self._begin_program(tid, ProgramOrigin(is_agents=is_guarded, is_confined=is_guarded), inside_call=False)
            else:
                ptrace(CONT, tid)
        elif tid not in self.tasks:
            self.waiting[tid] = time.monotonic()
        elif tid in self.newborn:
            self.newborn.discard(tid)
            ptrace(CONT, tid)
        elif event == EVENT_STOP and number in GROUP_STOPS:
            ptrace(LISTEN, tid)
        else:
            ptrace(CONT, tid, 0, 0 if event or number == SYSCALL_STOP else number)

    def _keep_schedule(self, tid: int, call: str) -> None:
        """A program says how much of the machine others get; one of the agent says so of the agent's only. Tests that
        compare its speed would else run their reference on one processor, behind everything else."""
        if self.tasks[tid].program.is_agents:
            registers = get_registers(tid, self.machine)
            target = self.machine.arguments[SCHEDULES[call]]
            kind = registers[self.machine.arguments[0]] & 0xFFFFFFFF if SCHEDULES[call] else None
            asked = str(registers[target] & 0xFFFFFFFF)
            inside = {
                read_status(each).get("NSpid", "").rpartition("\t")[2]
                for each, task in self.tasks.items()
                if task.program.is_agents
            }
            if asked not in inside or kind not in (None, int(call == "ioprio_set")):
                registers[self.machine.arguments[0]] = registers[target] = NO_PROCESS
                set_registers(tid, registers)
        ptrace(CONT, tid)

    def _check_opening(self, tid: int, opening: OpenedName | tuple[str, list[int]], result: int) -> None:
        """A call that opens, enters, lays a link or moves is done: whether a link forges the reward."""
        if self.guarded is None:
            return
        program, has_failed = self.tasks[tid].program, result >= 2**63
        call = opening.call if isinstance(opening, OpenedName) else opening[0]
        if has_failed and not (program.is_copier and result == 2**64 - errno.EACCES):
            return
        if not has_failed and call not in PLACES and not has_arrived(tid, call, result, self.guarded):
            return
        name = opening if isinstance(opening, OpenedName) else read_name(tid, *opening)
        # In other places the agent can have laid no link, though the tests can have brought one there.
        if name.folder is None and call not in ENTERS and call not in PLACES and not is_agents(name.path):
            return
        if call in PLACES:
            # It is mounted by itself: what a move brings to a name in it was in it before, and the tests' own.
            if call in RENAMES and f"{name.path}/".startswith(f"{self.guarded}/"):
                return
            link = None if has_failed else leading_link(tid, name, self.guarded)
            if link is not None:
                raise RewardForged(f"{link}, which the tests moved, copied or unpacked, leads to files of the tests")
            return
        if has_failed:
            led = follow(name.path, lambda path: read_target(f"/proc/{tid}/root{path}")) or ""
            is_forgery = f"{led}/".startswith(f"{self.guarded}/") and not name.path.startswith(f"{self.guarded}/")
        else:
            is_forgery = is_forged(tid, name, result, guarded=self.guarded, visited=program.visited)
        if is_forgery:
            raise RewardForged(f"a link led what the tests do with {name.path} to {self.guarded}")

    def _add_task(self, tid: int, *, parent: Task) -> None:
        """A thread or process was born."""
        program, facts = parent.program, read_status(tid)
        if facts.get("TracerPid") != str(os.getpid()):
            return  # killed and reaped before this report: the number may be a stranger's by now
        process = tid if facts["Tgid"] == str(tid) else parent.process
        self.tasks[tid] = Task(process, program)
        if process == tid:
            program.processes.add(tid)
        was_waiting = self.waiting.pop(tid, None) is not None
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile; its parent is to run on all the same
            if program.is_over:
                os.kill(tid, signal.SIGKILL)
            elif was_waiting:
                ptrace(CONT, tid)
            else:
                self.newborn.add(tid)

    def _kill_unclaimed(self) -> None:
        """End new processes whose birth will not be reported any more."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + UNCLAIMED_LOOK_SECONDS
        for tid, since in list(self.waiting.items()):
            seconds = now - since
            if seconds > UNCLAIMED_MOST_SECONDS or (seconds > UNCLAIMED_SECONDS and not self._is_expected(tid)):
                del self.waiting[tid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(tid, signal.SIGKILL)

    def _is_expected(self, tid: int, *, dying: Collection[int] = ()) -> bool:
        """Whether a new thread or process may have a parent that is about to report its birth.

        Such a parent runs, or stands still at its report. One that sleeps has nothing to report, because it could not
        have left the call by which it forks. Orphans are the children of the sandbox's first process, which sleeps.
        """
        facts = read_status(tid)
        parent, own = facts.get("PPid"), facts.get("Tgid")
        for other, task in self.tasks.items():
            if task.process not in dying and (state := read_status(other)):
                # Its parent, another thread of its process, or (CLONE_PARENT) another child of its parent.
                is_near = str(task.process) in (parent, own) or state["PPid"] == parent
                if is_near and state["State"][0] not in "SZXI":
                    return True
        return False

    def _begin_program(self, process: int, origin: ProgramOrigin, *, inside_call: bool = True) -> None:
        """A process has begun a program, and has not run any of it."""
        program = self.tasks[process].program
        is_new, former = program.root != process, program
        was_agents, was_confined = former.is_agents, former.is_confined
        if is_new:
            program.processes.discard(process)
            program = Program(process, former, domains=former.domains, processes={process})
            self.programs.add(program)
            self.tasks[process] = Task(process, program)
            if program.parent is not None and program.parent.is_over:
                os.kill(process, signal.SIGKILL)
                return
        is_first_of_agents = origin.is_agents and not was_agents
        is_first_confined = is_first_of_agents or (origin.is_confined and not was_confined)
        program.is_agents = was_agents or origin.is_agents
        program.is_copier = former.is_copier or origin.is_copier
        program.is_confined = was_confined or origin.is_confined
        program.is_ln = origin.is_ln
        program.visited.add(read_link(f"/proc/{process}/cwd"))
        # The last domain is for a program of the agent; one of the tests stays in that of the program that started it.
        if is_first_confined or (is_new and program.domains < MOST_DOMAINS - 1):
            program.domains += 1
            try:
                if inside_call:
                    # On from inside `execve` to its end: the kernel would overwrite what is put into registers before.
                    self.put_off.clear()
                    self._until_call(process)
                writable, handles, file_limit = None, [], None
                if is_first_confined:
                    assert self.guarded is not None
                    if self.guarded_handle is None:
                        folder = f"/proc/{process}/root{self.guarded}"
                        self.guarded_handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                    writable = writable_places(process, self.guarded)
                    if is_first_of_agents:
                        handles = exchanged_handles(process, self.guarded)
                        file_limit = lower_file_limit(process)
                        if inside_call:
                            change_home(process)
                confine(
                    process,
                    self.machine,
                    version=self.landlock_version,
                    writable=writable,
                    handles=handles,
                    file_limit=file_limit,
                    until_call=self._until_call,
                    # A checker that is killed has found no fault. Where programs are to outlive the one that started
                    # them, another one may have to stop them (`stop.sh`), and all of them are beside each other.
                    keeps_signals=is_first_of_agents and self.kills_strays,
                )
                while self.put_off:
                    os.kill(process, self.put_off.pop())
            except ProcessLookupError:
                return  # killed meanwhile; its death comes next
            except (TracingFailed, OSError):
                os.kill(process, signal.SIGKILL)
                return
        ptrace(CONT, process)

    def _origin(self, process: int) -> ProgramOrigin:
        program = self.tasks[process].program
        is_bubblewrap = program.parent is None and program.root == process
        if self.guarded is None or program.is_agents or is_bubblewrap:
            return ProgramOrigin()  # what is below a program of the agent is the agent's as well
        place = f"/proc/{process}"
        try:
            with open(f"{place}/cmdline", "rb") as file:
                words = os.fsdecode(file.read()).split("\0")[:-1]
            with open(f"{place}/auxv", "rb") as file:
                vector = dict(struct.iter_unpack("=QQ", file.read()))
            open_files = {int(number): os.readlink(f"{place}/fd/{number}") for number in os.listdir(f"{place}/fd")}
            # Bash has removed a here-document. A program of the agent that is alive could have written to it before.
            is_agent_alive = any(other.is_agents and other.processes for other in self.programs)
            not_documents = [
                number
                for number, path in open_files.items()
                if path.endswith(" (deleted)") and (is_agent_alive or os.stat(f"{place}/fd/{number}").st_nlink)
            ]
            run = Execution(
                executable=os.readlink(f"{place}/exe"),
                file=read_text(process, vector[AT_EXECFN]),
                words=words,
                folder=os.readlink(f"{place}/cwd"),
                open_files=open_files,
                root=f"{place}/root",
                not_documents=frozenset(not_documents),
            )
        except (OSError, KeyError, struct.error):
            return ProgramOrigin(is_agents=True, is_confined=True)  # killed meanwhile, or of another architecture
        is_of_agent, is_copier = runs_agents_code(run), takes_names_from_files(run)
        is_confined = is_of_agent or (is_copier and not names_folder(run, self.guarded))
        return ProgramOrigin(is_of_agent, is_copier, is_confined, is_ln=os.path.basename(run.executable) == "ln")

    def _bury(self, tid: int) -> None:
        """A thread is dead, and its parent does not know: end what its program left, then let the parent know."""
        task = self._forget(tid)
        if task is not None and task.process == tid:
            task.program.processes.discard(tid)
            if task.program.root == tid and self.kills_strays:
                self._kill_below(task.program)
            if task.program.root == tid and task.program.is_confined:
                self._reopen_guarded()
            if not task.program.processes and not any(other.parent is task.program for other in self.programs):
                self.programs.discard(task.program)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, tid, os.WEXITED | WALL)

    def _reopen_guarded(self) -> None:
        """Landlock does not forbid `chmod`: whatever a program has closed to the tests, they can write to again."""
        if self.guarded_handle is None:
            return
        folder = f"/proc/self/fd/{self.guarded_handle}"
        with contextlib.suppress(OSError):
            os.chmod(folder, os.stat(folder).st_mode | 0o700)
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.guarded_handle)
            with contextlib.suppress(OSError):  # where /logs is not the tests' own, a program cannot close it either
                os.chmod(f"/proc/self/fd/{above}", os.fstat(above).st_mode | 0o700)
            os.close(above)
            for name in os.listdir(folder):
                handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.guarded_handle)
                mode = os.fstat(handle).st_mode
                if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                    os.chmod(f"/proc/self/fd/{handle}", mode | (0o700 if stat.S_ISDIR(mode) else 0o600))
                os.close(handle)

    def _kill_below(self, program: Program) -> None:
        below = [other for other in self.programs if other.is_below(program)]
        for other in below:
            other.is_over = True
        left = {process for other in below for process in other.processes}
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._limit("processes that were killed do not end")
        next_look = time.monotonic() + UNCLAIMED_LOOK_SECONDS
        while left:
            gone = {process for process in left if self._is_reaped(process)}
            left -= gone
            if gone:
                self._limit("processes that were killed do not end")
            elif time.monotonic() > next_look:
                # The first process of the sandbox ends when all the others are reaped, those too whose parent was
                # killed before it could report their birth.
                unclaimed = {each for each in tracees() if each not in self.tasks and each not in left}
                for process in {each for each in unclaimed if not self._is_expected(each, dying=left)}:
                    os.kill(process, signal.SIGKILL)  # ours, and not reaped, so the number is still its own
                    left.add(process)
                next_look = time.monotonic() + UNCLAIMED_LOOK_SECONDS
            if left:
                time.sleep(0.0005)
        self.limit = None
        for other in below:
            other.processes.clear()
        self.programs.difference_update(other for other in below if other is not program)

    def _is_reaped(self, process: int) -> bool:
        """Reap a process that was killed, with its threads, which must go first."""
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
        except OSError:
            threads = []
        for tid in sorted(threads, key=lambda each: each == process) or [process]:
            try:
                is_gone = os.waitid(os.P_PID, tid, os.WEXITED | os.WNOHANG | WALL) is not None
            except ChildProcessError:
                is_gone = True
            if is_gone:
                self._forget(tid)
                if tid == process:
                    return True
        return False

    def _forget(self, tid: int) -> Task | None:
        """A thread is dead; what was known of it."""
        self.waiting.pop(tid, None)
        self.newborn.discard(tid)
        self.executing.pop(tid, None)
        self.opening.pop(tid, None)
        return self.tasks.pop(tid, None)

    def _limit(self, what: str) -> None:
        self.limit = time.monotonic() + STUCK_SECONDS, what

    def _check_limit(self, *_: object) -> None:
        if self.limit is not None and time.monotonic() > self.limit[0]:
            what, self.limit = self.limit[1], None
            signal.setitimer(signal.ITIMER_REAL, 0)  # once: what follows must not be interrupted
            raise TracerStuck(f"no progress for {STUCK_SECONDS:g} s: {what}")

    def _until_call(self, tid: int) -> None:
        """Let it run to the next beginning or end of a system call."""
        self._limit("a new program does not make the system calls that confine it")
        ptrace(SYSCALL, tid)
        while True:
            found = os.waitid(os.P_PID, tid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | WALL)
            if found is None or found.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                self.limit = None
                raise ProcessLookupError(tid)
            os.waitid(os.P_PID, tid, os.WSTOPPED | os.WNOHANG | WALL)
            if found.si_status == SYSCALL_STOP:
                self.limit = None
                return
            if found.si_status < 0x100:  # a signal that came meanwhile
                self.put_off.append(found.si_status)
            ptrace(SYSCALL, tid)


def why_impossible() -> str | None:
    """Why programs cannot be kept apart here, found out by trying; None where they can."""
    if platform.machine() not in MACHINES:
        return f"it is not known how on {platform.machine()}"
    version = landlock_version()
    if version < 2:
        return "the kernel has no Landlock of version 2 (Linux 5.19, with landlock in its list of security modules)"

    def start() -> None:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # A program that looks at the shell that started it: it must not see the shell's files.
        os.execve(
            "/bin/sh", ["sh", "-c", "readlink /proc/$$/exe > /dev/null && exit 7; exit 8"], {"PATH": "/usr/bin:/bin"}
        )

    try:
        code = Tracer(kills_strays=True, landlock_version=version).run(start)
    except OSError as exc:
        return f"ptrace is refused: {exc.strerror}"
    return None if code == 8 else f"a trial ended with exit code {code}"
