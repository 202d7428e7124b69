"""Tells a coding agent which runs have ended since it was last told: a hook for SessionStart, UserPromptSubmit and
PostToolUse of Claude Code and Codex.

In: the hook's JSON on stdin (session_id, hook_event_name, cwd), the index of the project's experiments and the runs'
`run_result.json`. Out: `additionalContext` as JSON on stdout, facts only, with validation scores and no test scores;
nothing where nothing is new. What a session was sent is kept in `.evsys/agent/`. Standard library only.
"""

import glob
import json
import os
import re
import sqlite3
import sys

MAX_LINES = 6
KEPT_SESSIONS = 20


def find_workspace(cwd):
    folder = os.path.abspath(cwd)
    while not os.path.isdir(os.path.join(folder, ".evsys")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    return os.path.join(folder, ".evsys")


def find_records(workspace):
    """Paths of the experiments' records, of finished and of running ones."""
    index = os.path.join(workspace, "experiments.sqlite")
    if not os.path.isfile(index):
        return []
    try:
        # Read-only and not waiting: the process of an experiment may be writing.
        database = sqlite3.connect(
            "file:" + index.replace("?", "%3f").replace("#", "%23") + "?mode=ro", uri=True, timeout=0.2
        )
        try:
            return [row[0] for row in database.execute("SELECT record FROM experiments")]
        finally:
            database.close()
    except sqlite3.Error:
        return []


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stamp(path):
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return None


def plain(text, limit=120):
    """Text of a record without control characters, shortened: it must not steer a terminal or a reader."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", str(text))[:limit]


def ended_files(records):
    """Path -> stamp of every result: of runs, and of whole experiments."""
    found = {}
    for record in records:
        for path in [record, *glob.glob(os.path.join(glob.escape(os.path.dirname(record)), "*", "run_result.json"))]:
            mark = stamp(path)
            if mark:
                found[path] = mark
    return found


def describe(path):
    result = read_json(path)
    if path.endswith(".experiment_result.json"):
        name = plain(result.get("experiment") or result.get("name") or os.path.basename(path))
        return (
            f"Experiment {name} ended: {plain(result.get('status', 'unknown'))}. Its conclusion: `evsys show {name}`."
        )
    metrics = result.get("metrics") if isinstance(result.get("metrics"), dict) else {}
    scores = [f"{plain(key)} {value:.3f}" for key, value in sorted(metrics.items())
              if key.startswith("val/") and isinstance(value, (int, float))]  # fmt: skip
    run = plain(os.path.relpath(os.path.dirname(path), os.path.dirname(os.path.dirname(os.path.dirname(path)))))
    return f"Run {run} ended: {plain(result.get('status', 'unknown'))}{', ' + ', '.join(scores[:3]) if scores else ''}."


def forget_old_sessions(folder):
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.json")), key=os.path.getmtime)
    for path in files[:-KEPT_SESSIONS]:
        os.unlink(path)


def main():
    try:
        event = json.load(sys.stdin)
        name, cwd = event.get("hook_event_name", "SessionStart"), event.get("cwd") or os.getcwd()
        workspace = find_workspace(cwd)
        if workspace is None:
            return 0
        session = re.sub(r"[^\w-]", "_", str(event.get("session_id") or "session"))[:80]
        state = os.path.join(workspace, "agent", session + ".json")
        is_first = not os.path.exists(state)
        seen, ended = read_json(state), ended_files(find_records(workspace))
        new = [path for path, mark in ended.items() if seen.get(path) != mark]
        if not new and not is_first:
            return 0
        os.makedirs(os.path.dirname(state), exist_ok=True)
        with open(state + ".part", "w", encoding="utf-8") as file:
            json.dump(ended, file)
        os.replace(state + ".part", state)
        forget_old_sessions(os.path.dirname(state))
        experiments = [path for path in ended if path.endswith(".experiment_result.json")]
        if is_first:
            if not experiments:
                return 0
            newest = describe(max(experiments, key=os.path.getmtime))
            lines = [f"This project has {len(experiments)} finished experiments; `evsys context` sums them up.", newest]
        else:
            new.sort(key=lambda path: int(ended[path]))
            lines = [describe(path) for path in new[-MAX_LINES:]]
            if len(new) > MAX_LINES:
                lines.insert(0, f"{len(new)} results are new; the last {MAX_LINES}:")
    except Exception as exc:  # news is a convenience: no tool call may fail for it
        print(f"evsys plugin: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 0
    print(json.dumps({"hookSpecificOutput": {"hookEventName": name, "additionalContext": "\n".join(lines)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
