"""The program that refuses system calls, carried out as the kernel would."""

from __future__ import annotations

import struct

import pytest

from evsys_sandbox.seccomp import ARCHITECTURES, REFUSED, seccomp_filter

ALLOW, REFUSE, UNKNOWN_FAMILY, NOT_THERE, INVALID = 0x7FFF0000, 0x00050001, 0x00050061, 0x00050026, 0x00050016
X86_64, I386, AARCH64, UNKNOWN = 0xC000003E, 0x40000003, 0xC00000B7, 0x16
AF_UNIX, AF_INET, AF_ALG, AF_VSOCK = 1, 2, 38, 40


def verdict(
    architecture: int, number: int, first: int = 0, third: int = 0, *, second: int = 0, traced: bool = False
) -> int:
    program = list(struct.iter_unpack("=HBBI", seccomp_filter(traces_executions=traced, traces_opens=traced)))
    data = {
        0: number,
        4: architecture,
        16: first & 0xFFFFFFFF,
        24: second & 0xFFFFFFFF,
        32: third & 0xFFFFFFFF,
        36: third >> 32,
    }
    place, held = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            held = data[operand]
        elif code == 0x06:
            return operand
        else:
            true = {0x15: held == operand, 0x35: held >= operand, 0x45: held & operand != 0}[code]
            place += if_true if true else if_false


@pytest.mark.parametrize(("architecture", "first"), [(X86_64, 248), (I386, 286), (AARCH64, 217)])
def test_the_three_calls_of_the_keyrings_are_refused_and_their_neighbours_are_not(architecture, first):
    answers = [verdict(architecture, number) for number in range(first - 1, first + 4)]
    assert answers == [ALLOW, REFUSE, REFUSE, REFUSE, ALLOW]


@pytest.mark.parametrize(
    "number", [101, 310, 311, 312, 323, 425, 426, 427, 438, 440, 298, 304, 319, 321], ids=lambda n: f"x86_64 {n}"
)
def test_calls_into_other_processes_and_into_much_attacked_parts_of_the_kernel_are_refused(number):
    assert verdict(X86_64, number) == REFUSE


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_every_architecture_refuses_every_call_by_its_own_number(architecture):
    missing = set(REFUSED) - architecture.numbers.keys()
    assert missing <= {"socketcall"}
    assert {verdict(architecture.audit, architecture.numbers[name]) for name in REFUSED if name not in missing} == {
        REFUSE
    }
    assert verdict(architecture.audit, 1) == ALLOW


@pytest.mark.parametrize(("architecture", "socket"), [(X86_64, 41), (I386, 359), (AARCH64, 198)])
def test_sockets_are_of_the_usual_families_only(architecture, socket):
    families = (AF_UNIX, AF_INET, AF_ALG, AF_VSOCK)
    assert [verdict(architecture, socket, family) for family in families] == [
        ALLOW,
        ALLOW,
        UNKNOWN_FAMILY,
        UNKNOWN_FAMILY,
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_no_process_is_born_out_of_its_tracers_sight(architecture):
    """`clone` with CLONE_UNTRACED is refused, and `clone3`, whose flags cannot be seen, is not there."""
    clone, fork, thread, untraced = architecture.numbers["clone"], 17, 0x3D0F00, 0x00800000
    answers = [verdict(architecture.audit, clone, flags) for flags in (fork, thread, untraced, fork | untraced)]
    assert answers == [ALLOW, ALLOW, REFUSE, REFUSE]
    assert verdict(architecture.audit, 435) == NOT_THERE


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_a_process_changes_no_limits_but_its_own(architecture):
    """`prlimit64(pid, resource, new, old)`: with another pid only without new limits, wherever they lie in memory."""
    number, itself, another = architecture.numbers["prlimit64"], 0, 77
    calls = [(itself, 0), (itself, 0x7FFF_0000_1000), (another, 0), (another, 0x1000), (another, 0x7FFF_0000_0000)]
    answers = [verdict(architecture.audit, number, pid, new) for pid, new in calls]
    assert answers == [ALLOW, ALLOW, ALLOW, REFUSE, REFUSE]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_the_tracer_sees_executions_where_there_is_one(architecture):
    numbers = [architecture.numbers[name] for name in ("execve", "execveat")]
    assert [verdict(architecture.audit, number) for number in numbers] == [ALLOW, ALLOW]
    assert [verdict(architecture.audit, number, traced=True) for number in numbers] == [0x7FF00000, 0x7FF00001]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_the_tracer_sees_what_opens_files_to_write_or_folders(architecture):
    """Not what opens files to read; `openat2`, whose flags cannot be seen, is not there."""
    read, flags = 0o2000000, (0o1, 0o2, 0o101, 0o1001, 0o200000, 0o10000000)
    at, numbers = architecture.audit, architecture.numbers
    seen = [verdict(at, numbers["openat"], third=each, traced=True) for each in (read, *flags)]
    assert seen == [ALLOW, *[0x7FF00003] * len(flags)]
    if "open" in numbers:
        seen = [verdict(at, numbers["open"], second=each, traced=True) for each in (read, *flags)]
        assert seen == [ALLOW, *[0x7FF00002] * len(flags)]
        assert verdict(at, numbers["creat"], traced=True) == 0x7FF00004
    assert [verdict(at, numbers[name], traced=True) for name in ("chdir", "fchdir")] == [0x7FF00005, 0x7FF00006]
    assert verdict(at, 437, traced=True) == NOT_THERE
    names = ("openat", "chdir", "fchdir", "openat2")
    assert {verdict(at, numbers[name], third=0o1) for name in names} == {ALLOW}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_a_program_types_nothing_into_its_terminal(architecture):
    """TIOCSTI, TIOCLINUX, and neighbours of the first (TIOCGWINSZ, TIOCGSID)."""
    at, number = architecture.audit, architecture.numbers["ioctl"]
    assert [verdict(at, number, 0, second=each) for each in (0x5412, 0x541C, 0x5413, 0x5429)] == [
        REFUSE,
        REFUSE,
        ALLOW,
        ALLOW,
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_no_open_file_that_tests_share_becomes_one_of_whole_blocks(architecture):
    """F_SETFL with O_DIRECT; not with O_NONBLOCK and O_APPEND, and no other command, such as F_SETFD."""
    at, direct = architecture.audit, 0o200000 if architecture.audit in (0xC00000B7, 0x40000028) else 0o40000
    for name in {"fcntl", "fcntl64"} & architecture.numbers.keys():
        calls = [(4, direct), (4, direct | 0o4000), (4, 0o6001), (2, direct)]
        answers = [verdict(at, architecture.numbers[name], 1, flags, second=does, traced=True) for does, flags in calls]
        assert answers == [INVALID, INVALID, ALLOW, ALLOW]
        assert verdict(at, architecture.numbers[name], 1, direct, second=4) == ALLOW


@pytest.mark.parametrize("number", [0, 1, 59, 101, 250, 521])
def test_the_second_numbering_of_x86_64_is_refused_whole(number):
    assert verdict(X86_64, 0x40000000 + number) == REFUSE


def test_on_a_machine_it_does_not_know_nothing_passes():
    assert {verdict(UNKNOWN, number) for number in (0, 1, 59, 250)} == {REFUSE}


@pytest.mark.parametrize(("number", "kind"), [(141, 0), (251, 1), (203, None), (144, None)])
def test_a_traced_program_asks_before_it_says_how_much_of_the_machine_another_process_gets(number, kind):
    """setpriority and ioprio_set name a kind first: a process, a group, all of a user."""

    def answer(kind, who, traced=True):
        return verdict(X86_64, number, *([who] if kind is None else [kind]), second=who, traced=traced)

    assert answer(kind, 0) == ALLOW
    assert answer(kind, 7, traced=False) == ALLOW
    asked = {answer(kind, 7), *([answer(kind + 1, 0)] if kind is not None else [])}
    assert {each & 0xFFFF0000 for each in asked} == {0x7FF00000}
