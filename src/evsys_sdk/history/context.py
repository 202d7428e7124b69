"""What to know before the next experiment, within a number of tokens.

In: a history. Out: sections of lines (what is best and how it was reached, what of a difference is noise, what is open,
what led nowhere, what was tried) and the same as markdown. Invalid experiments are named and not built on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.format import count, shown
from evsys_sdk.history.digest import ArmDigest, Digest, Settings
from evsys_sdk.history.history import ExperimentEntry, History
from evsys_sdk.history.leaderboard import LeaderboardRow, Track, looks_of, runs_of, tracks_of, values_tried

# Text that fits: sections of lines, as many as a number of tokens allows.
#
# In: sections whose lines come in order of importance. Out: the sections with the lines that fit, and how many did
# not.
#
# Tokens are estimated, since every model counts otherwise: a run of ASCII letters counts one for every five begun,
# any other sign that is not a space one, the end of a line one. On what `evsys context` prints that is 0-5 % above
# what the tokenizer of SmolLM2 says, which takes digits one by one, and some 30 % above GPT-4o's: the budget holds
# for either.


LETTERS = 5
BESIDE = 4
"""Tokens that a line costs besides its words: the bullet or the quotes, and its end."""
_PIECE = re.compile(r"[A-Za-z]+|[^\sA-Za-z]|\n")


def count_tokens(text: str) -> int:
    """An estimate on the high side."""
    return sum(-(-len(piece) // LETTERS) for piece in _PIECE.findall(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and its lines, the most important first."""

    title: str
    lines: tuple[str, ...]
    left_out: int = 0
    share: int = 1
    """Lines it gets at each turn."""


def fit(sections: Sequence[Section], tokens: int, render: Callable[[Sequence[Section]], str]) -> list[Section]:
    """The sections cut so that `render` of them is within `tokens`; each gets lines in turn, so that none starves."""
    kept = [0] * len(sections)
    # What stands there without any line (headings, how many are left out) is paid for first.
    room = tokens - count_tokens(render(_cut(sections, kept)))
    hungry = list(range(len(sections)))
    while hungry:
        still = []
        for index in hungry:
            section = sections[index]
            for line in section.lines[kept[index] : kept[index] + section.share]:
                cost = count_tokens(line) + BESIDE
                # A section whose next line does not fit gets no further turn: lesser lines must not overtake it.
                if cost > room:
                    break
                room -= cost
                kept[index] += 1
            else:
                still += [index] if kept[index] < len(section.lines) else []
        hungry = still
    # The cost of a line is an estimate; the length of the whole text decides.
    while any(kept) and count_tokens(render(_cut(sections, kept))) > tokens:
        kept[max(range(len(kept)), key=kept.__getitem__)] -= 1
    return _cut(sections, kept)


def _cut(sections: Sequence[Section], kept: Sequence[int]) -> list[Section]:
    return [
        replace(section, lines=section.lines[:count], left_out=len(section.lines) - count)
        for section, count in zip(sections, kept, strict=True)
    ]


FEWEST_TOKENS = 400
LONGEST_HYPOTHESIS, LONGEST_REMARK, LONGEST_ERROR = 160, 300, 120
SHOWN_CHANGES, SHOWN_ARMS, SHOWN_VALUES = 4, 6, 6
TITLE = "# What was tried here"
COUNTED = "tokens are estimated, on the high side: see docs/history.md"


def make_context(history: History, tokens: int) -> dict[str, Any]:
    """The context as plain data whose JSON is within `tokens`."""
    from evsys_sdk.files import to_json

    sections = fit(_sections(history, tokens), tokens, lambda found: to_json(_plain(found, tokens), indent=2))
    return _plain(sections, tokens) | {"tokens": count_tokens(to_json(_plain(sections, tokens), indent=2))}


def context_text(history: History, tokens: int) -> str:
    """The context as markdown within `tokens`."""
    return _markdown(fit(_sections(history, tokens), tokens, _markdown))


def _sections(history: History, tokens: int) -> list[Section]:
    if tokens < FEWEST_TOKENS:
        raise EvsysError(f"--tokens must be at least {FEWEST_TOKENS}, not {tokens}: there would be nothing to read")
    entries, tracks = history.entries, tracks_of(history.entries)
    overview = ["No experiment is known here yet."]
    if entries:
        counts = ", ".join(f"{n} {status}" for status, n in Counter(entry.status for entry in entries).most_common())
        first, last = entries[-1].date[:10], entries[0].date[:10]
        overview = [f"{count(len(entries), 'experiment')} from {first} to {last}: {counts}."]
        if history.problems:
            overview.append(f"{count(len(history.problems), 'file')} could not be read: evsys history says which.")
    # Undecided against a best that was surpassed since: no open question, and its changes are named nowhere else.
    changes = {
        row.entry.name: f"against {row.before.entry.name}: {_changes(row)}"
        for track in tracks
        for row in track.undecided
        if row.before is not None and row.before is not track.kept[-1] and len(row.entry.digest.arms) == 1
    }
    found = [
        ("Overview", 9, overview),
        ("Best so far, and how it was reached (newest first)", 2, leaderboard_lines(tracks)),
        ("Noise floor", 1, map(noise_line, tracks)),
        ("Benchmarks selected on (most used first)", 1, map(str, looks_of(entries))),
        ("Open questions", 2, open_questions(entries, tracks)),
        ("Dead ends (newest first)", 2, dead_ends(entries, tracks)),
        ("Values tried, by their best score (arms, best, median)", 2, value_lines(tracks)),
        (
            "Tried (newest first)",
            3,
            (tried_line(entry, changes.get(entry.name, "")) for entry in entries if entry.state != "unreadable"),
        ),
    ]
    sections = [Section(title=title, lines=tuple(lines), share=share) for title, share, lines in found]
    return [section for section in sections if section.lines]


def _plain(sections: Sequence[Section], tokens: int) -> dict[str, Any]:
    return {
        "budget": tokens,
        # Holds the place of the real count, which is no larger and so costs no more tokens.
        "tokens": tokens,
        "counted": COUNTED,
        "sections": [{"title": s.title, "lines": list(s.lines), "left_out": s.left_out} for s in sections],
    }


def _markdown(sections: Sequence[Section]) -> str:
    lines = [TITLE]
    for section in sections:
        lines += ["", f"## {section.title}", *(f"- {line}" for line in section.lines)]
        lines += [f"- ({section.left_out} more left out)"] if section.left_out else []
    return "\n".join(lines) + "\n"


def leaderboard_lines(tracks: Sequence[Track]) -> Iterator[str]:
    """The best of every track first, then how each was reached, so that a small budget has all the bests."""
    climbed = [track for track in tracks if track.kept]
    for track in climbed:
        yield f"{track.label}: {_row_line(track.kept[-1])}"
    for track in climbed:
        for row in reversed(track.kept[:-1]):
            yield f"before, {track.label}: {_row_line(row)}"
    for track in tracks:
        if not track.selects:
            yield f"{track.label}: on a test benchmark alone, and test scores select nothing; it makes no leaderboard"


def _row_line(row: LeaderboardRow) -> str:
    unit = row.entry.digest.unit
    text = f"{shown(row.score, unit=unit)} ({_seeds(row.arm)}) {_arm_name(row)}, {row.entry.date[:10]}"
    text += f"; {row.arm.errors}" if row.arm.n_errors else ""
    text += f"; {row.arm.training_mark}" if row.arm.training_mark else ""
    if row.before is None:
        return f"{text}; first"
    noise = "noise not known" if row.floor is None else f"noise {shown(row.floor, unit=unit)}"
    return f"{text}; {shown(row.gain or 0.0, unit=unit, signed=True)} ({noise}) by {_changes(row)}"


def _seeds(arm: ArmDigest) -> str:
    """`2 seeds`, `1 of 3 seeds`."""
    scored, launched = len(arm.scores), len(arm.statuses)
    return count(scored, "seed") if scored >= launched else f"{scored} of {launched} seeds"


def _arm_name(row: LeaderboardRow) -> str:
    return row.entry.name if len(row.entry.digest.arms) == 1 else f"{row.entry.name} / {_arm_label(row.arm)}"


def _arm_label(arm: ArmDigest) -> str:
    """`learning_rate=0.001` for an arm of a sweep, else its name."""
    if 0 < len(arm.own) <= 2:
        return ", ".join(f"{_short_key(key)}={value}" for key, value in arm.own.items())
    return arm.arm


def _short_key(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _changes(row: LeaderboardRow) -> str:
    assert row.before is not None
    found = list(changed(row.before.settings, row.settings))
    told = []
    for key, old, new in found[:SHOWN_CHANGES]:
        before, now = _value(old), _value(new)
        if before == now:  # they differ beyond what is shown of a long text or a number
            before, now = _from_difference(repr(old), repr(new))
        told.append(f"{_short_key(key)} {before} -> {now}")
    more = f" and {len(found) - SHOWN_CHANGES} more" if len(found) > SHOWN_CHANGES else ""
    return ", ".join(told) + more if told else "the same settings"


def _from_difference(old: str, new: str) -> tuple[str, str]:
    """Both texts from shortly before the place where they differ: `...be brief`, `...be polite`."""
    start = max(
        0, next((at for at, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) == 2), len(old)) - 12
    )
    before, now = (text if len(text) <= 40 else f"...{text[start : start + 40]}" for text in (old, new))
    return before, now


def changed(before: Settings, now: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Settings that differ; None for one that is not there."""
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def _value(value: Any) -> str:
    return "(not set)" if value is None else f"{value:g}" if isinstance(value, float) else shorten(str(value), 40)


def noise_line(track: Track) -> str:
    noise, floor, unit = track.noise, track.noise.floor(), track.unit
    told = []
    if noise.seed_sd is not None:
        told.append(
            f"scatter over seeds: sd {shown(noise.seed_sd, unit=unit)} ({count(noise.degrees, 'degree')} of freedom)"
        )
    if noise.wildest_sd is not None:
        told.append(f"the seeds of one arm scatter more, sd {shown(noise.wildest_sd, unit=unit)}, and count for less")
    if noise.half_width is not None:
        told.append(f"95 % interval over tasks: +-{shown(noise.half_width, unit=unit)}")
    if floor is None:
        return f"{track.label}: not known; run an arm with n_repeats: 3 and score on a benchmark"
    least = shown(floor, unit=unit)
    return f"{track.label}: two single runs that differ by less than {least} may be equal ({'; '.join(told)})"


def open_questions(entries: Sequence[ExperimentEntry], tracks: Sequence[Track]) -> Iterator[str]:
    for entry in entries:
        if entry.state == "running":
            yield f"{entry.name} is running since {entry.date}{_asks(entry.digest)}"
        elif entry.state == "interrupted" and entry.notes.why_invalid is None:
            yield f"{entry.name} was interrupted ({entry.date}); run the same command to resume it{_asks(entry.digest)}"
    for track in tracks:
        best = track.kept[-1] if track.kept else None
        if best is not None and len(best.arm.scores) == 1 and len(track.entries) > 1:
            yield f"the best of {track.label}, {_arm_name(best)}, has one seed: would it hold with n_repeats: 3?"
        if best is not None and best.before is not None and best.floor is None:
            yield f"{track.label}: how much is noise is not known, so the leaderboard may be luck"
        for row in reversed(track.undecided):
            if row.before is best and row.before and list(changed(row.before.settings, row.settings)):
                word = "better" if (row.gain or 0.0) * (1 if track.mode == "max" else -1) > 0 else "as good"
                noise = f"within noise ({shown(row.floor or 0.0, unit=track.unit)})"
                yield f"is {_arm_name(row)} {word}? {_against(row)}, {noise}; {_changes(row)}"
    # Experiments may be made of the same runs: the oldest, which comes last, asks the question for all of them.
    repeats = any(entry.digest.is_repeat for entry in entries)
    first = {_question(entry): entry for entry in entries if entry.counts} if repeats else {}
    for entry in entries:
        if entry.counts:
            yield from _questions_of(entry, repeats=entry.digest.is_repeat and first[_question(entry)] is not entry)


def _question(entry: ExperimentEntry) -> tuple[frozenset[str] | bool | str, ...]:
    """A key that experiments share which compare the same runs by the same metric."""
    return runs_of(entry), entry.digest.selects, *entry.digest.measured


def _questions_of(entry: ExperimentEntry, *, repeats: bool) -> Iterator[str]:
    """`repeats`: another one asks the same of the same runs."""
    digest = entry.digest
    if digest.leakage:
        yield f"{entry.name}: can its scores be believed? {shorten(digest.leakage, LONGEST_REMARK)}"
    broken = [f"{arm.errors} in {_arm_label(arm)}" for arm in digest.scored if arm.has_many_errors]
    if broken:
        yield f"{entry.name}: can its scores be believed? {'; '.join(broken[:3])}; errors count as failures"
    if digest.constant is not None:
        scored = shown(digest.constant, unit=digest.unit)
        is_solved = digest.constant == 1.0 and digest.share is True and digest.mode == "max"
        what = "harder tasks would show a difference" if is_solved else "check the answers and the verifier"
        same = f"every arm scored {scored} on every task: {what}"
        if not any("/" in key for key in digest.measured):  # a number of training, such as a loss, has no tasks
            same = f"every arm has {digest.metric} {shown(digest.constant)}: check whether their settings differ"
        yield f"{entry.name}: {same}"
    undecided = [arm for arm in digest.arms if arm.verdict == "undecided" and digest.selects]
    if undecided and not repeats:
        each = "; ".join(f"{_arm_label(arm)}{f' needs {arm.needs}' if arm.needs else ''}" for arm in undecided[:3])
        yield f"{entry.name}: undecided against the baseline: {each}"
    if (digest.outcome or "").startswith("inconclusive"):
        yield f"{entry.name}: inconclusive{_asks(digest)}"
    unscored = [arm for arm in digest.arms if arm.why_unscored and digest.metric]
    if unscored and entry.state != "failed":  # that is a dead end
        why = unscored[0].error or unscored[0].why_unranked or unscored[0].why_unscored
        more = f" and {len(unscored) - 3} more" if len(unscored) > 3 else ""
        names = ", ".join(_arm_label(arm) for arm in unscored[:3])
        yield f"{entry.name}: not scored: {names}{more} ({shorten(why, LONGEST_REMARK)})"


def _asks(digest: Digest) -> str:
    return f": {shorten(digest.hypothesis, LONGEST_HYPOTHESIS)}" if digest.hypothesis else ""


def dead_ends(entries: Sequence[ExperimentEntry], tracks: Sequence[Track]) -> Iterator[str]:
    found = [
        (row.entry.when, f"{_arm_name(row)}: {row.outcome}, {_against(row)}; {_changes(row)}")
        for track in tracks
        for row in track.dead_ends
    ]
    for entry in entries:
        if entry.notes.why_invalid is not None:
            why = shorten(entry.notes.why_invalid, LONGEST_REMARK)
            found.append((entry.when, f"{entry.name}: invalid, do not build on it: {why}"))
        elif entry.state == "failed":
            error = next((arm.error for arm in entry.digest.arms if arm.error), None) or "no error is recorded"
            found.append((entry.when, f"{entry.name}: every run failed: {shorten(error, LONGEST_ERROR)}"))
    yield from (line for _, line in sorted(found, key=lambda pair: -pair[0]))


def _against(row: LeaderboardRow) -> str:
    assert row.before is not None
    before, now = (shown(score, unit=row.entry.digest.unit) for score in (row.before.score, row.score))
    return f"{now} against {before} of {row.before.entry.name}"


def value_lines(tracks: Sequence[Track]) -> Iterator[str]:
    """A line per setting of which several values were scored; they say what has been covered, and not why."""
    for track in tracks:
        where = f" by {track.label}" if len(tracks) > 1 else ""
        for key, values in values_tried(track).items():
            texts = []
            for one in values[:SHOWN_VALUES]:
                middle = f", {shown(median(one.scores), unit=track.unit)}" if len(one.scores) > 1 else ""
                texts.append(
                    f"{_value(one.value)} ({len(one.scores)}, {shown(one.scores[0], unit=track.unit)}{middle})"
                )
            more = f" and {len(values) - SHOWN_VALUES} more" if len(values) > SHOWN_VALUES else ""
            yield f"{key}{where}: {', '.join(texts)}{more}"


def tried_line(entry: ExperimentEntry, changes: str = "") -> str:
    """An experiment with its size, its changes, its hypothesis, its scores (`pass@1: learning_rate=0.1 0.950 better,
    ...`, the best first where scores may rank) and what people concluded."""
    digest = entry.digest
    seeds = max((len(arm.statuses) for arm in digest.arms), default=0)
    made = " on ".join(filter(None, [digest.setup.get("model", ""), digest.setup.get("backend", "")]))
    size = [entry.date[:10], entry.status, *([made] if made else [])]
    if len(digest.arms) > 1:
        size.append(count(len(digest.arms), "arm") + (f" x {seeds} seeds" if seeds > 1 else ""))
    elif seeds > 1:
        size.append(f"{seeds} seeds")
    size += ["runs taken over from other experiments"] if digest.is_repeat else []
    size += [f"cut to {digest.max_steps} steps"] if digest.max_steps else []
    parts = [f"{entry.name} ({', '.join(size)}{f'; {changes}' if changes else ''})"]
    if digest.hypothesis:
        parts.append(shorten(digest.hypothesis, LONGEST_HYPOTHESIS).rstrip("."))
    if not entry.counts:
        return ". ".join(parts)
    arms, report = digest.scored, "" if digest.selects else " (test scores, a report and no ranking)"
    unscored = next((arm.why_unscored for arm in digest.arms if arm.why_unscored), "")
    if len(arms) == 1 and len(digest.arms) == 1:
        parts.append(f"{digest.metric} {_score(arms[0], digest.unit)}{report}")
    elif arms:
        more = f" and {len(arms) - SHOWN_ARMS} more" if len(arms) > SHOWN_ARMS else ""
        scores = ", ".join(f"{_arm_label(arm)} {_score(arm, digest.unit)}" for arm in arms[:SHOWN_ARMS])
        parts.append(f"{digest.metric}{report}: {scores}{more}")
    elif digest.metric and unscored:
        parts.append(f"no score by {digest.metric}: {shorten(unscored, LONGEST_ERROR)}")
    parts += [digest.outcome] if digest.outcome else []
    for note in entry.notes.conclusions[-1:]:
        parts.append(f"{note.by or 'someone'} concluded: {shorten(note.text, LONGEST_REMARK)}")
    return ". ".join(parts)


def _score(arm: ArmDigest, unit: str) -> str:
    """`0.950 better`, with the seeds and rollouts that were lost."""
    lost = [_seeds(arm)] if len(arm.scores) < len(arm.statuses) else []
    lost += [arm.errors] if arm.n_errors else []
    lost += [arm.training_mark] if arm.training_mark else []
    text = shown(arm.mean or 0.0, unit=unit) + (f" {arm.verdict}" if arm.verdict else "")
    return f"{text} ({'; '.join(lost)})" if lost else text
