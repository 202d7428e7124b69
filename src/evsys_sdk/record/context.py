"""What to know before the next experiment, within a number of tokens.

In: a history. Out: sections of lines (what is best and how it was reached, what of a difference is noise, what is open,
what led nowhere, what was tried) and the same as markdown. Invalid experiments are named and not built on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.record.digest import ArmDigest, Digest, Settings
from evsys_sdk.record.history import Entry, History
from evsys_sdk.record.ladder import Rung, Track, runs_of, tracks_of, values_tried
from evsys_sdk.record.looks import looks_of
from evsys_sdk.record.token_budget import Section, count_tokens, fit

FEWEST_TOKENS = 400
LONGEST_HYPOTHESIS, LONGEST_REMARK, LONGEST_ERROR = 160, 300, 120
SHOWN_CHANGES, SHOWN_ARMS, SHOWN_VALUES = 4, 6, 6
TITLE = "# What was tried here"
COUNTED = "tokens are estimated, on the high side: see docs/history.md"


def make_context(history: History, tokens: int) -> dict[str, Any]:
    """The context as plain data whose JSON is within `tokens`."""
    from evsys_sdk.atomic import to_json

    sections = fit(_sections(history, tokens), tokens, lambda found: to_json(_plain(found, tokens), indent=2))
    return _plain(sections, tokens) | {"tokens": count_tokens(to_json(_plain(sections, tokens), indent=2))}


def context_text(history: History, tokens: int) -> str:
    """The context as markdown within `tokens`."""
    return _markdown(fit(_sections(history, tokens), tokens, _markdown))


def _sections(history: History, tokens: int) -> list[Section]:
    if tokens < FEWEST_TOKENS:
        raise EvsysError(f"--tokens must be at least {FEWEST_TOKENS}, not {tokens}: there would be nothing to read")
    tracks = tracks_of(history.entries)
    found = [
        Section(title="Overview", lines=tuple(_overview(history)), share=9),
        Section(
            title="Best so far, and how it was reached (newest first)", lines=tuple(_ladder_lines(tracks)), share=2
        ),
        Section(title="Noise floor", lines=tuple(map(_noise_line, tracks))),
        Section(title="Benchmarks selected on (most used first)", lines=tuple(map(str, looks_of(history.entries)))),
        Section(title="Open questions", lines=tuple(_open_questions(history, tracks)), share=2),
        Section(title="Dead ends (newest first)", lines=tuple(_dead_ends(history, tracks)), share=2),
        Section(title="Values tried, by their best score (arms, best, median)", lines=tuple(_values(tracks)), share=2),
        Section(title="Tried (newest first)", lines=tuple(_tried(history.entries)), share=3),
    ]
    return [section for section in found if section.lines]


def _plain(sections: Sequence[Section], tokens: int) -> dict[str, Any]:
    return {
        "budget": tokens,
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


def _overview(history: History) -> Iterator[str]:
    entries = history.entries
    if not entries:
        yield "No experiment is known here yet."
        return
    counts = Counter(entry.status for entry in entries)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    yield f"{_count(len(entries), 'experiment')} from {entries[-1].date[:10]} to {entries[0].date[:10]}: {told}."
    if history.problems:
        yield f"{_count(len(history.problems), 'file')} could not be read: evsys history tells which."


def _ladder_lines(tracks: Sequence[Track]) -> Iterator[str]:
    """The best of every track first, then how each was reached, so that a small budget has all the bests."""
    climbed = [track for track in tracks if track.rungs]
    for track in climbed:
        yield f"{track.label}: {_rung_line(track.rungs[-1])}"
    for track in climbed:
        for rung in reversed(track.rungs[:-1]):
            yield f"before, {track.label}: {_rung_line(rung)}"
    for track in tracks:
        if not track.selects:
            yield f"{track.label}: on a test benchmark alone, and test scores select nothing; no ladder is made of it"


def _rung_line(rung: Rung) -> str:
    text = f"{rung.score:.3f} ({_seeds(rung.arm)}) {_arm_name(rung)}, {rung.entry.date[:10]}"
    text += f"; {rung.arm.errors}" if rung.arm.n_errors else ""
    text += "; tasks of its benchmark appear in its training rows" if rung.entry.digest.leakage else ""
    if rung.before is None:
        return f"{text}; first"
    noise = "noise not known" if rung.floor is None else f"noise {rung.floor:.3f}"
    return f"{text}; {rung.gain:+.3f} ({noise}) by {_changes(rung)}"


def _seeds(arm: ArmDigest) -> str:
    """`2 seeds`, `1 of 3 seeds`."""
    scored, launched = len(arm.scores), len(arm.statuses)
    return _count(scored, "seed") if scored >= launched else f"{scored} of {launched} seeds"


def _arm_name(rung: Rung) -> str:
    return rung.entry.name if len(rung.entry.digest.arms) == 1 else f"{rung.entry.name} / {_arm_label(rung.arm)}"


def _arm_label(arm: ArmDigest) -> str:
    """`learning_rate=0.001` for an arm of a sweep, else its name."""
    if 0 < len(arm.own) <= 2:
        return ", ".join(f"{_short_key(key)}={value}" for key, value in arm.own.items())
    return arm.arm


def _short_key(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _changes(rung: Rung) -> str:
    assert rung.before is not None
    found = list(changed(rung.before.settings, rung.settings))
    told = [f"{_short_key(key)} {_value(old)} -> {_value(new)}" for key, old, new in found[:SHOWN_CHANGES]]
    more = f" and {len(found) - SHOWN_CHANGES} more" if len(found) > SHOWN_CHANGES else ""
    return ", ".join(told) + more if told else "the same settings"


def changed(before: Settings, now: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Settings that differ; None for one that is not there."""
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def _value(value: Any) -> str:
    return "(not set)" if value is None else f"{value:g}" if isinstance(value, float) else shorten(str(value), 40)


def _noise_line(track: Track) -> str:
    noise, floor = track.noise, track.noise.floor()
    told = []
    if noise.seed_sd is not None:
        told.append(f"scatter over seeds: sd {noise.seed_sd:.3f} ({noise.degrees} degrees of freedom)")
    if noise.half_width is not None:
        told.append(f"95 % interval over tasks: +-{noise.half_width:.3f}")
    if floor is None:
        return f"{track.label}: not known; run an arm with n_repeats: 3 and score on a benchmark"
    return f"{track.label}: two single runs that differ by less than {floor:.3f} may be equal ({'; '.join(told)})"


def _open_questions(history: History, tracks: Sequence[Track]) -> Iterator[str]:
    for entry in history.entries:
        if entry.state == "running":
            yield f"{entry.name} is running since {entry.date}{_asks(entry.digest)}"
        elif entry.state == "interrupted" and entry.notes.why_invalid is None:
            yield f"{entry.name} was interrupted ({entry.date}); run the same command to resume it{_asks(entry.digest)}"
    for track in tracks:
        yield from _questions_of_best(track)
    asked = _first_askers(history.entries)
    for entry in history.entries:
        if entry.counts:
            repeats = entry.digest.is_repeat and asked[_question(entry)] is not entry
            yield from _questions_of(entry, repeats=repeats)


def _question(entry: Entry) -> tuple[Any, ...]:
    """The same for experiments that compare the same runs by the same metric."""
    return runs_of(entry), entry.digest.selects, *entry.digest.measured


def _first_askers(entries: Sequence[Entry]) -> dict[tuple[Any, ...], Entry]:
    """The oldest of those that compare the same runs; nothing where no experiment repeats another."""
    repeats = any(entry.digest.is_repeat for entry in entries)
    return {_question(entry): entry for entry in entries if entry.counts} if repeats else {}


def _questions_of_best(track: Track) -> Iterator[str]:
    best = track.rungs[-1] if track.rungs else None
    if best is not None and len(best.arm.scores) == 1 and len(track.entries) > 1:
        yield f"the best of {track.label}, {_arm_name(best)}, has one seed: would it hold with n_repeats: 3?"
    if best is not None and best.before is not None and best.floor is None:
        yield f"{track.label}: how much is noise is not known, so the ladder may be luck"
    for rung in reversed(track.undecided):
        if rung.before is best and rung.before and list(changed(rung.before.settings, rung.settings)):
            word = "better" if (rung.gain or 0.0) * (1 if track.mode == "max" else -1) > 0 else "as good"
            yield f"is {_arm_name(rung)} {word}? {_against(rung)}, within noise ({rung.floor:.3f}); {_changes(rung)}"


def _questions_of(entry: Entry, *, repeats: bool) -> Iterator[str]:
    """`repeats`: another one asks the same of the same runs."""
    digest = entry.digest
    if digest.leakage:
        yield f"{entry.name}: can its scores be believed? {shorten(digest.leakage, LONGEST_REMARK)}"
    broken = [f"{arm.errors} in {_arm_label(arm)}" for arm in digest.arms if arm.has_many_errors]
    if broken:
        yield f"{entry.name}: can its scores be believed? {'; '.join(broken[:3])}; errors count as failures"
    if digest.constant is not None:
        yield f"{entry.name}: every arm scored {digest.constant:.3f} on every task: check the answers and the verifier"
    undecided = [arm for arm in digest.arms if arm.verdict == "undecided" and digest.selects]
    if undecided and not repeats:
        each = "; ".join(f"{_arm_label(arm)}{f' needs {arm.needs}' if arm.needs else ''}" for arm in undecided[:3])
        yield f"{entry.name}: undecided against the baseline: {each}"
    if (digest.outcome or "").startswith("inconclusive"):
        yield f"{entry.name}: inconclusive{_asks(digest)}"
    # What a search left behind is an answer, and no question.
    unscored = [arm for arm in digest.arms if not arm.scores and digest.metric and set(arm.statuses) != {"pruned"}]
    if unscored and digest.scored:
        why = unscored[0].error or unscored[0].why_unranked or "no score"
        yield f"{entry.name}: not scored: {_names(unscored)} ({shorten(why, LONGEST_ERROR)})"


def _names(arms: Sequence[ArmDigest]) -> str:
    more = f" and {len(arms) - 3} more" if len(arms) > 3 else ""
    return ", ".join(_arm_label(arm) for arm in arms[:3]) + more


def _asks(digest: Digest) -> str:
    return f": {shorten(digest.hypothesis, LONGEST_HYPOTHESIS)}" if digest.hypothesis else ""


def _dead_ends(history: History, tracks: Sequence[Track]) -> Iterator[str]:
    found = [(rung.entry.when, _dead_end(rung)) for track in tracks for rung in track.dead_ends]
    for entry in history.entries:
        if entry.notes.why_invalid is not None:
            found.append((entry.when, f"{entry.name}: invalid, do not build on it: {_remark(entry.notes.why_invalid)}"))
        elif entry.state == "failed":
            error = next((arm.error for arm in entry.digest.arms if arm.error), None) or "no error is recorded"
            found.append((entry.when, f"{entry.name}: every run failed: {shorten(error, LONGEST_ERROR)}"))
    yield from (line for _, line in sorted(found, key=lambda pair: -pair[0]))


def _dead_end(rung: Rung) -> str:
    return f"{_arm_name(rung)}: {rung.outcome}, {_against(rung)}; {_changes(rung)}"


def _against(rung: Rung) -> str:
    assert rung.before is not None
    return f"{rung.score:.3f} against {rung.before.score:.3f} of {rung.before.entry.name}"


def _values(tracks: Sequence[Track]) -> Iterator[str]:
    """A line per setting of which several values were scored; they say what has been covered, and not why."""
    for track in tracks:
        for key, values in values_tried(track).items():
            told = [f"{_value(one.value)} ({_tally(one.scores)})" for one in values[:SHOWN_VALUES]]
            more = f" and {len(values) - SHOWN_VALUES} more" if len(values) > SHOWN_VALUES else ""
            where = f" by {track.label}" if len(tracks) > 1 else ""
            yield f"{key}{where}: {', '.join(told)}{more}"


def _tally(scores: Sequence[float]) -> str:
    return f"1, {scores[0]:.3f}" if len(scores) == 1 else f"{len(scores)}, {scores[0]:.3f}, {median(scores):.3f}"


def _remark(text: str) -> str:
    return shorten(text, LONGEST_REMARK)


def _tried(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry.state != "unreadable":
            yield _tried_line(entry)


def _tried_line(entry: Entry) -> str:
    digest = entry.digest
    parts = [f"{entry.name} ({entry.date[:10]}, {entry.status}{_size(digest)})"]
    if digest.hypothesis:
        parts.append(shorten(digest.hypothesis, LONGEST_HYPOTHESIS).rstrip("."))
    if entry.counts:
        parts += [_scores(digest)] if digest.scored else []
        parts += [digest.outcome] if digest.outcome else []
        parts += [f"{note.by or 'someone'} concluded: {_remark(note.text)}" for note in entry.notes.conclusions[-1:]]
    return ". ".join(parts)


def _size(digest: Digest) -> str:
    seeds = max((len(arm.statuses) for arm in digest.arms), default=0)
    made = [digest.setup.get("model", ""), digest.setup.get("backend", "")]
    told = f", {' on '.join(filter(None, made))}" if any(made) else ""
    told += f", {_count(len(digest.arms), 'arm')}" if len(digest.arms) > 1 else ""
    told += f" x {seeds} seeds" if len(digest.arms) > 1 and seeds > 1 else f", {seeds} seeds" if seeds > 1 else ""
    told += ", runs taken over from other experiments" if digest.is_repeat else ""
    return told + (f", cut to {digest.max_steps} steps" if digest.max_steps else "")


def _scores(digest: Digest) -> str:
    """`pass@1: learning_rate=0.1 0.950 better, learning_rate=0.001 0.850`, the best first where scores may rank."""
    arms = digest.scored
    report = "" if digest.selects else " (test scores, a report and no ranking)"
    if len(arms) == 1 and len(digest.arms) == 1:
        return f"{digest.metric} {_score(arms[0])}{report}"
    told = [f"{_arm_label(arm)} {_score(arm)}" for arm in arms[:SHOWN_ARMS]]
    more = f" and {len(arms) - SHOWN_ARMS} more" if len(arms) > SHOWN_ARMS else ""
    return f"{digest.metric}{report}: {', '.join(told)}{more}"


def _score(arm: ArmDigest) -> str:
    """`0.950 better`, with the seeds and rollouts that were lost."""
    lost = [_seeds(arm)] if len(arm.scores) < len(arm.statuses) else []
    lost += [arm.errors] if arm.n_errors else []
    return f"{arm.mean:.3f}{f' {arm.verdict}' if arm.verdict else ''}{f' ({"; ".join(lost)})' if lost else ''}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
