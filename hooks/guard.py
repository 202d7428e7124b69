"""Keeps a coding agent away from test-split files and keys: a PreToolUse hook of Claude Code and Codex, and Cursor's
beforeShellExecution, beforeReadFile and beforeMCPExecution.

In: the hook's JSON on stdin (tool_name, tool_input, cwd; Cursor's has its own form). Out: exit code 0, or 2 with
the reason on stderr, which the agent reads; for Cursor `{"permission": ...}` on stdout. Runs before every tool call, so
it uses the standard library only and any Python from 3.9 on.

Protected are the test entries of the project's configs (an entry without a label is a test entry), `data/benchmark/`,
files called `test.jsonl`, what holds test rollouts (journals, `logs/test/`), and files that hold keys. New files may be
written; what exists may not be read, searched, copied or changed.

This is a guard rail against slips, not a sandbox: a program that puts a path together at run time is not seen
(docs/agents.md).
"""

import fnmatch
import functools
import glob
import itertools
import json
import os
import re
import sqlite3
import subprocess
import sys
import time

MAX_CONFIGS = 500
MAX_RECORDS = 100
MAX_FILES = 20000
SECONDS = 5.0
"""For the paths of one command, below the hook's own time limit; after that the command is refused, not let through."""
KEY_NAMES = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "id_ecdsa*",
    ".netrc",
    "credentials",
    "credentials.*",
    ".credentials.json",
    ".git-credentials",
    ".pypirc",
)
KEY_EXAMPLES = (".env.example", ".env.sample", ".env.template", "*.pub")
KEY_FOLDERS = (
    "~/.ssh", "~/.aws", "~/.gnupg", "~/.config/gcloud", "~/.config/gh", "~/.config/evsys", "~/.cache/huggingface/token",
    "~/.docker/config.json", "~/.kube", "~/.codex/auth.json", "~/.gemini/oauth_creds.json",
)  # fmt: skip
TEST_NAMES = ("test.jsonl", "test.jsonl.gz", "*journal.sqlite*", "*.rollouts.jsonl", "dashboard.sqlite*")
ROWS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
ROLLOUTS = ("rollouts.jsonl", "rollouts.jsonl.gz")
OPEN_ROLLOUTS = ("validation", "training")
"""Folders of a run's logs in which rollouts are of one split; regrades and `evsys benchmark run` keep all together."""
PROJECT_MARKS = (".evsys", "pyproject.toml", "experiments", ".git")
SKIPPED = {".git", ".venv", "node_modules", "__pycache__", "site-packages"}

TEST_ADVICE = (
    "It holds tasks of the test split. They are scored by `evsys run` and stay unread, so that test scores mean "
    "something. Use the validation tasks in data/validation, or `evsys rollouts <experiment> --failed --no-test`."
)
KEY_ADVICE = (
    "It holds keys. Programs read them from the environment; `evsys validate <config>` says which one is missing, "
    "without showing it."
)
SEARCH_ADVICE = " Name the folders to search, such as src, experiments or data/datasets/<name>/v1/train.jsonl."

HARMLESS = {
    "ls", "cd", "pushd", "pwd", "test", "[", "stat", "du", "mkdir", "touch", "echo", "true", "wc", "which", "realpath",
    "dirname", "basename", "sha256sum", "md5sum", "evsys", "tree", "chmod",
}  # fmt: skip
"""Programs that print nothing of a file's content."""
PREFIXES = {
    "sudo", "time", "nohup", "exec", "command", "builtin", "coproc", "uv", "run", "if", "elif", "else", "while",
    "until", "then", "do", "!", "{",
}  # fmt: skip
"""Words before the name of a program."""
STARTERS = {
    "env", "timeout", "nice", "ionice", "setsid", "stdbuf", "xargs", "watch", "bash", "sh", "zsh", "dash", "eval",
    "script", "parallel", "flock", "poetry", "pipx", "uvx", "hatch", "pixi", "conda",
}  # fmt: skip
"""Programs that start the one among their words; `python -m` is another."""
READS_ALL = re.compile(
    r"\b(?:grep|egrep|fgrep|zgrep|diff|scp)\b[^|;&\n]*\s(?:-\w*[rR]\w*|--recursive|--dereference-recursive"
    r"|-d\s*recurse|--directories=recurse)\b"
    r"|\b(?:rg|ripgrep|ugrep|ag|ack)\b|\bfd(?:find)?\b[^|;&\n]*\s(?:-\w*[xX]|--exec)|\bgit\s+(?:grep|archive|bundle)\b|\b(?:tar|zip|rsync|7z|cpio)\b"
    r"|\b(?:copytree|make_archive|rglob)\b|\bos\.walk\b|\bmount\b"
    r"|\bcp\b[^|;&\n]*\s(?:-\w*[rRa]\w*|--recursive|--archive)\b"
    r"|\bfind\b.*(?:-exec|-delete|\|)|\bxargs\b|\bwhile\s+read\b|\bfor\s+\w+\s+in\b|\bln\b|\bmv\b"
)
"""Programs that read, copy or move whole folders."""
ENDINGS_OF_TYPES = {
    "py": (".py", ".pyi"), "python": (".py", ".pyi"), "md": (".md", ".markdown", ".mdx"), "yaml": (".yaml", ".yml"),
    "toml": (".toml",), "js": (".js", ".jsx", ".mjs", ".cjs", ".vue"), "ts": (".ts", ".tsx", ".mts", ".cts"),
    "sh": (".sh", ".bash", ".zsh"), "rust": (".rs",), "go": (".go",),
}  # fmt: skip
"""File types of ripgrep that hold no rows; any other type may."""
GIT_SHOWS_NAMES = (
    "--stat", "--name-only", "--name-status", "--numstat", "--shortstat", "--summary", "--no-patch", "-s", "--dirstat",
)  # fmt: skip
SECRET_WORD = r"[A-Z0-9_]*(?:API_KEY|SECRET|TOKEN|PASSWORD|ACCESS_KEY)[A-Z0-9_]*"
SHOWS_KEYS = re.compile(
    r"(?:^|[;&|(`\n]|\s-\w*c\s*['\"]?)\s*(?:sudo\s+)?(?:\S*/)?(?:printenv|env(?:\s+(?:-0|--null))?|set|export(?:\s+-p)?"
    r"|declare\s+-[px]+|compgen\s+-e)\s*(?:$|['\";&|)>`\n])"
    r"|\bprintenv\s+"
    + SECRET_WORD
    + r"|\b(?:echo|printf|cat\s*<<<)\b[^;&|\n]*\$(?:\{!|\{?"
    + SECRET_WORD
    + r")|\bprint\b[^;&|\n]*\b(?:environ|getenv)\b[^;&|\n]*"
    + SECRET_WORD
    + r"|/proc/[^/\s]+/environ|\bprocess\.env\b(?!\s*[.\[])|\bENVIRON\b|%ENV\b|\bps\s+[a-df-z]*e[a-z]*\b"
    r"|\bgit\s+credential\s+fill\b|\bgh\s+auth\s+token\b|\bgpg\b[^;&|\n]*--export-secret"
    r"|os\.environ\b(?!\s*(?:\[|\.get\b|\.setdefault\b|\.pop\b|\.update\b))"
)
OWN_TOOLS = re.compile(r"mcp__(?:plugin_evsys_)?evsys__")
"""Tools of our MCP server, which hands out no test rows."""
PATH_LIKE = re.compile(r"[^\s'\"`$(){}<>|;&=,:]+")


@functools.cache
def find_project(cwd):
    """The nearest folder upwards that looks like a project; else `cwd`."""
    folder = cwd
    while True:
        if any(os.path.exists(os.path.join(folder, mark)) for mark in PROJECT_MARKS[:2]):
            return folder
        parent = os.path.dirname(folder)
        if parent == folder:
            return cwd
        folder = parent


def find_configs(root):
    patterns = ("*.yaml", "*.yml", "experiments/*/*.yaml", "experiments/*/*.yml", "configs/*.yaml", "examples/*/*.yaml")
    found = [path for pattern in patterns for path in sorted(glob.glob(os.path.join(glob.escape(root), pattern)))]
    return found[:MAX_CONFIGS]


def benchmark_entries(text):
    """The benchmark entries of a config's YAML text, each as its own text.

    Read without a YAML parser, which Python does not bring: the block below `benchmark:` is cut at its list items, a
    flow list (`[...]`) at its braces. Comments are left out.
    """
    lines = [re.sub(r"(^|\s)#.*$", "", line).rstrip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        match = re.match(r"^(\s*)(?:-\s+)?[\"']?benchmark[\"']?\s*:(.*)$", line)
        flow = re.search(r"[{,]\s*[\"']?benchmark[\"']?\s*:(.*)$", line) if not match else None
        if not match and not flow:
            continue
        indent = len(match.group(1)) if match else len(line) - len(line.lstrip())
        block = [match.group(2) if match else flow.group(1)]
        for later in lines[number + 1 :]:
            width = len(later) - len(later.lstrip())
            if later.strip() and (width < indent or (width == indent and not re.match(r"\s*[-\]}]", later))):
                break
            block.append(later)
        body = "\n".join(block)
        braces = re.findall(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", body)
        first = re.search(r"^([ \t]*)-\s", body, re.M)
        # Only at the indentation of the first item: an entry may hold a list, such as its tags.
        items = re.split(rf"\n{first.group(1)}-\s", "\n" + body) if first else [body]
        for item in items:
            inner = [each for each in braces if each in item and re.search(r"\b(?:path|id|name)\b", each)]
            yield from inner or [item]


def is_validation(entry):
    if re.search(r"\bsplit[\"']?\s*:\s*[\"']?val\b", entry):
        return True
    tags = re.search(r"\btags[\"']?\s*:\s*(\[[^\]]*\]|(?:\s*\n\s*-[^\n]*)+)", entry)
    return bool(tags and re.search(r"\bval\b", tags.group(1)) and not re.search(r"\btest\b", tags.group(1)))


@functools.cache
def protected_paths(root):
    """Files and folders (real paths) that hold test tasks."""
    found, open_paths, open_ids, test_ids = set(), set(), set(), set()
    for config in find_configs(root):
        try:
            with open(config, encoding="utf-8", errors="replace") as file:
                text = file.read(1000000)
        except OSError:
            continue
        for entry in benchmark_entries(text):
            values = re.findall(r"\bpath[\"']?\s*:\s*[\"']?([^\s\"',}\]]+)", entry)
            if not values:  # it names a benchmark of the workspace
                ids = set(re.findall(r"\b(?:id|name)[\"']?\s*:\s*[\"']?([^\s\"',}\]]+)", entry))
                (open_ids if is_validation(entry) else test_ids).update(ids)
            for value in values:
                for folder in (os.path.dirname(config), root):
                    path = os.path.realpath(os.path.join(folder, os.path.expanduser(value)))
                    if os.path.exists(path):
                        (open_paths if is_validation(entry) else found).add(path)
    found |= tested_before(root)
    # A set that one config validates on and another tests on stays protected.
    benchmarks = os.path.realpath(os.path.join(root, "data", "benchmark"))
    if os.path.isdir(benchmarks):
        found |= {path for name in os.listdir(benchmarks) for path in [os.path.join(benchmarks, name)]
                  if path not in open_paths}  # fmt: skip
    for path in glob.glob(os.path.join(glob.escape(os.path.realpath(root)), ".evsys", "benchmarks", "*.jsonl")):
        identity = os.path.basename(path)[: -len(".jsonl")]  # <name>-v<version>-<hash>
        if not (open_ids - test_ids) & {identity, re.sub(r"-v\d+-\w+$", "", identity)}:
            found.add(path)
    return found


def tested_before(root):
    """What experiments that were run here have tested on: a label that was changed afterwards opens nothing."""
    index = os.path.join(root, ".evsys", "experiments.sqlite")
    if not os.path.isfile(index):
        return set()
    try:
        address = "file:" + index.replace("%", "%25").replace("?", "%3f").replace("#", "%23") + "?mode=ro"
        database = sqlite3.connect(address, uri=True, timeout=1.0)
        try:
            newest = "SELECT record FROM experiments ORDER BY started DESC LIMIT ?"
            records = [row[0] for row in database.execute(newest, (MAX_RECORDS,))]
        finally:
            database.close()
    except sqlite3.Error:
        return set()
    found = set()
    for record in records:
        try:
            with open(record, encoding="utf-8") as file:
                result = json.load(file)
            entries = result["config"]["metadata"]["benchmark"]
            for entry in entries if isinstance(entries, list) else [entries]:
                is_open = entry.get("split") == "val" or "val" in (entry.get("tags") or [])
                for folder in (root, result.get("config_folder") or root) if entry.get("path") and not is_open else ():
                    path = os.path.realpath(os.path.join(folder, os.path.expanduser(entry["path"])))
                    found |= {path} if os.path.exists(path) else set()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # a record of another version, or one that is being written
    return found


def is_below(path, folder):
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def matches(name, patterns):
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def why_protected(path, cwd):
    """Why this file must stay unread; None where it may be read. `path` need not exist."""
    # These links lead elsewhere in the process of the hook.
    path = re.sub(r"^/proc/[^/]+/root(?=/)", "", re.sub(r"^/proc/[^/]+/cwd(?=/|$)", lambda _: cwd, path))
    real = os.path.realpath(path)
    # A session may have been started above the project, or in another one: the file's own project counts, too.
    tests = protected_paths(find_project(cwd)) | protected_paths(find_project(os.path.dirname(real)))
    for each in {os.path.abspath(path), real}:
        name = os.path.basename(each)
        if matches(name, KEY_NAMES) and not matches(name, KEY_EXAMPLES):
            return KEY_ADVICE
        if any(is_below(each, os.path.realpath(os.path.expanduser(folder))) for folder in KEY_FOLDERS):
            return KEY_ADVICE
        if any(is_below(each, test) for test in tests):
            return TEST_ADVICE
        if matches(name, TEST_NAMES) or (os.sep + "logs" + os.sep + "test" + os.sep) in each:
            return TEST_ADVICE
        if name in ROLLOUTS and os.path.basename(os.path.dirname(each)) not in OPEN_ROLLOUTS:
            return TEST_ADVICE
    if os.path.isfile(real) and os.stat(real).st_nlink > 1 and any(is_same_file(real, test) for test in tests):
        return TEST_ADVICE
    return None


def is_same_file(path, test):
    """Whether a hard link leads to a protected file."""
    files = [os.path.join(test, name) for name in os.listdir(test)] if os.path.isdir(test) else [test]
    return any(os.path.exists(file) and os.path.samefile(path, file) for file in files)


def find_inside(folder, cwd, wanted=None):
    """The first protected file in a folder whose name `wanted` accepts."""
    count = 0
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in files:
            count += 1
            if count > MAX_FILES:
                return None
            path = os.path.join(top, name)
            if (wanted is None or wanted(path)) and why_protected(path, cwd):
                return path
    return None


def misuse_of_tests(config, cwd):
    """Why this config must not be run: it trains or validates on what is closed. Its rows would come back as training
    rows and validation rollouts, which are open."""
    try:
        with open(config, encoding="utf-8", errors="replace") as file:
            text = file.read(1000000)
    except OSError:
        return None
    used = PATH_LIKE.findall(re.sub(r"(?m)(^|\s)#.*$", "", text))
    for entry in benchmark_entries(text):
        for word in PATH_LIKE.findall(entry) if not is_validation(entry) else ():
            if word in used:
                used.remove(word)
    for word in dict.fromkeys(used):
        for folder in (cwd, os.path.dirname(config), find_project(os.path.dirname(config))):
            path = os.path.join(folder, os.path.expanduser(word))
            why = why_protected(path, cwd) if os.path.lexists(path) else None
            if why:
                return f"{os.path.relpath(config, cwd)} uses {word}, which is closed to agents, beside its test " \
                       f"entries. {why}"  # fmt: skip
    return None


def check_own_tool(given, cwd):
    """A call of our MCP server: it hands out no test rows, and starts no config that would have them handed out."""
    path, overrides = given.get("path"), given.get("overrides")
    words = ["run", *([path] if isinstance(path, str) else []), *(overrides if isinstance(overrides, list) else [])]
    return check_evsys(words, cwd)


def check_evsys(words, cwd, command=""):
    """Why `evsys` must not be called with these words: a config, or a setting, that takes test rows for others."""
    if words[:1] not in (["run"], ["validate"], ["data"], ["research"], ["ablate"], ["eval"]):
        return None
    if any(re.match(r"(?:--set=)?metadata\.benchmark\b", str(word)) for word in words):
        return "metadata.benchmark is closed to agents on the command line: a test set would become a validation " \
               "set. Edit the config instead; new validation tasks go into data/validation."  # fmt: skip
    folders = re.findall(r"\b(?:cd|pushd)\s+(\S+)", command)
    for path in candidates(" ".join(map(str, [*folders, *words[1:]])), cwd):
        why = why_protected(path, cwd)
        if why:
            return f"{os.path.relpath(path, cwd)} is closed to agents. {why}"
        is_config = os.path.isfile(path) and not path.endswith(ROWS)
        why = misuse_of_tests(os.path.abspath(path), cwd) if is_config else None
        if why:
            return why
    return None


def check_file(tool, given, cwd):
    if OWN_TOOLS.match(tool):
        return check_own_tool(given, cwd)
    if tool in ("Read", "Edit", "MultiEdit", "Write", "NotebookEdit"):
        texts = [given.get("file_path") or given.get("path") or given.get("notebook_path")]
    else:  # of another server: any of its arguments may be a path or a command
        texts = list(texts_in(given))
    for text in texts:
        if not isinstance(text, str) or not text or len(text) > 4096 or "\0" in text:
            continue
        path = os.path.join(cwd, os.path.expanduser(re.sub(r"^file://", "", text)))
        if tool == "Write" and not os.path.lexists(path):
            return None  # a new benchmark may be written; once it is there it is closed
        why = why_protected(path, cwd) if os.path.lexists(path) or len(texts) == 1 else None
        if why:
            return f"{os.path.relpath(path, cwd)} is closed to agents. {why}"
        if os.path.isdir(path) and re.search(r"search|grep", tool):
            inside = find_inside(path, cwd)
            if inside:
                return f"This would search {os.path.relpath(inside, cwd)}, which is closed to agents.{SEARCH_ADVICE}"
    commands = [given.get(name) for name in ("command", "cmd", "code", "script")] if tool.startswith("mcp__") else []
    return next((why for text in commands if text for why in [check_command({"command": text}, cwd)] if why), None)


def texts_in(given):
    if isinstance(given, str):
        yield given
    for inner in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
        yield from texts_in(inner)


def check_grep(given, cwd):
    path = os.path.join(cwd, os.path.expanduser(given.get("path") or "."))
    why = why_protected(path, cwd)
    if why:
        return f"{os.path.relpath(path, cwd)} is closed to agents. {why}"
    shows_rows = given.get("output_mode", "files_with_matches") == "content"
    if not shows_rows or not os.path.isdir(path):
        return None
    endings = ENDINGS_OF_TYPES.get(given.get("type"))
    # Claude Code takes several patterns, with commas or blanks between them.
    patterns = [
        each for part in re.split(r"[\s,]+(?![^{]*\})", given.get("glob") or "") for each in expand_braces(part)
    ]
    wanted = [each for each in patterns if each and not each.startswith("!")]
    unwanted = [each[1:] for each in patterns if each.startswith("!")]

    def is_searched(file):
        names = {os.path.relpath(file, path), os.path.basename(file)}
        hit = not wanted or any(matches(name.lower(), [each.lower() for each in wanted]) for name in names)
        # A pattern without a star before the folder means: in any folder.
        hit = hit or any(fnmatch.fnmatch(os.path.relpath(file, path), each.replace("**/", "*")) for each in wanted)
        return hit and not any(matches(name, unwanted) for name in names) and (not endings or file.endswith(endings))

    inside = find_inside(path, cwd, is_searched)
    if inside:
        shown = os.path.relpath(inside, cwd)
        return f"This search would print rows of {shown}, which is closed to agents. Add `glob: \"*.py\"` or another " \
               f"filter, or a path.{SEARCH_ADVICE}"  # fmt: skip
    return None


def without_written_text(command):
    """The command without the bodies of here-documents that `cat` or `tee` write into a file: naming a path in a config
    is not reading it. Bodies for interpreters stay."""
    pattern = re.compile(r"^([^\n]*?)<<-?\s*(['\"]?)(\w+)\2([^\n]*)\n(.*?)^\s*\3\s*$", re.M | re.S)

    def cut(match):
        line = match.group(1) + match.group(4)
        program = re.split(r"[;&|]", match.group(1))[-1].split()
        is_writing = bool(program) and program[0] in ("cat", "tee") and ("|" not in match.group(4))
        return line + "\n" if is_writing else match.group(0)

    return pattern.sub(cut, command)


def fill_variables(text, command, cwd):
    """`$x` and `${x}` by assignments in the command and by the environment's few harmless ones."""
    values = {
        "HOME": os.path.expanduser("~"),
        "PWD": cwd,
        "CLAUDE_PROJECT_DIR": os.environ.get("CLAUDE_PROJECT_DIR", cwd),
    }
    for name, value in re.findall(r"(?:^|[\s;&|(])(\w+)=([^\s;&|]+)", command):
        values[name] = value.strip("'\"")
    for _ in range(3):  # a variable may hold another one
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match.group(1), match.group(0)), text)
    return text


def expand_braces(text):
    """`{a,b}` as the shell expands it; at most some dozens."""
    done, left = [], [text]
    while left and len(done) + len(left) < 64:
        each = left.pop()
        hit = re.search(r"(?<!\$)\{([^{}\s]*,[^{}\s]*)\}", each)
        if hit:
            left += [each[: hit.start()] + part + each[hit.end() :] for part in hit.group(1).split(",")]
        else:
            done.append(each)
    return done + left


def check_time(deadline):
    if time.monotonic() > deadline:
        raise TimeoutError("too many paths")


def decode_escapes(text):
    r"""What bash makes of `$'\x74est'`."""
    text = re.sub(
        r"\\x([0-9a-fA-F]{1,2})|\\u([0-9a-fA-F]{1,4})", lambda code: chr(int(code.group(1) or code.group(2), 16)), text
    )
    return re.sub(r"\\([0-7]{1,3})", lambda code: chr(int(code.group(1), 8) % 256), text)


def ends_of(word):
    parts = word.split("/")
    return ["/".join(parts[start:]) for start in range(1, min(len(parts) - 1, 12))]


def candidates(command, cwd):
    """Every path that words of the command may mean, from the current folder and from folders that it names."""
    deadline = time.monotonic() + SECONDS
    command = re.sub(r"\$'((?:[^'\\]|\\.)*)'", lambda quoted: decode_escapes(quoted.group(1)), command)
    command = re.sub(r"[@?*+!]\([^()]*\)", "*", command)  # bash's extended patterns
    # Quotes and backslashes inside a word do not change the path: te''st.jsonl.
    plain = fill_variables(re.sub(r"['\"\\]", "", command), command, cwd)
    spaced = fill_variables(re.sub(r"['\"\\]", " ", command), command, cwd)
    texts = {*expand_braces(plain), *expand_braces(spaced)}
    words = {word for text in texts for word in PATH_LIKE.findall(text)}
    words |= {word.split("=", 1)[1] for word in list(words) if "=" in word}
    words |= {word.lstrip("@-") for word in list(words)}
    # $(pwd)/data/x and $UNKNOWN/data/x: every end of the word that still is a path.
    words |= {end for word in list(words) for end in ends_of(word)}
    words = {os.path.expanduser(word) for word in words if word and len(word) < 1000}
    # A link's target is looked up from the link's folder.
    words |= {os.path.dirname(word) for word in words} if re.search(r"\bln\b", command) else set()
    folders = {cwd}
    for _ in range(3):  # cd a && cd b
        folders |= {os.path.normpath(os.path.join(folder, word)) for folder in set(folders) for word in words
                    if os.path.isdir(os.path.join(folder, word))}  # fmt: skip
        if len(folders) > 200:
            break
    for folder in folders:
        for word in words:
            check_time(deadline)
            path = os.path.join(folder, word)
            if glob.has_magic(word):
                # Not recursive, as in bash without globstar; `**` is looked at by `find_by_pattern`.
                yield from itertools.islice(glob.iglob(path.replace("**", "*")), MAX_FILES)
            elif os.path.lexists(path):
                yield path


def find_by_pattern(command, cwd):
    """A protected file of the project that a pattern with `**` would hit."""
    for word in PATH_LIKE.findall(re.sub(r"['\"\\]", "", command)):
        if "**" in word:
            pattern = os.path.normpath(os.path.join(cwd, os.path.expanduser(word))).replace("**/", "*")
            found = find_inside(find_project(cwd), cwd, lambda file, pattern=pattern: fnmatch.fnmatch(file, pattern))
            if found:
                return found
    return None


OPTIONS_OF_ROLLOUTS = {"--task", "--arm", "--benchmark", "--step", "--limit", "--dir", "--workspace"}
"""Those of `evsys rollouts` that take the next word as their value."""
PARTS = re.compile(r"(\|\||&&|[;|&\n]|\$\(|`|\()")


def words_of(part):
    """The words of one part of a command line, from its program on."""
    words = part.split()
    while words and (re.match(r"^\w+=", words[0]) or words[0] in PREFIXES):
        words = words[1:]
    return [os.path.basename(words[0].strip("'\"")), *words[1:]] if words else []


def programs_of(command):
    """The program of each part of a command line, with its words."""
    for part in PARTS.split(command)[::2]:
        words = words_of(part)
        if words:
            yield words[0], words


def calls_of_evsys(command, cwd):
    """The words after each `evsys` of a command line, also where another program starts it."""
    for part in PARTS.split(fill_variables(re.sub(r"\\\n", " ", command), command, cwd))[::2]:
        words = words_of(part)
        program = re.sub(r"['\"\\]", "", words[0]) if words else ""
        if program in STARTERS or re.match(r"python[\d.]*$", program):
            # `bash -c "evsys rollouts x"` has the program within quotes.
            words = re.sub(r"['\"]", " ", part).split()
            names = [re.sub(r"^(-m)?evsys_sdk(\.cli\.main|\.cli)?$", "evsys", os.path.basename(word)) for word in words]
            words = words[names.index("evsys") :] if "evsys" in names else words
        elif program != "evsys":
            continue
        yield [re.sub(r"['\"\\]", "", word) for word in words[1:]]


def has_flag(words, flags):
    """Whether one of `flags` is there as a flag: as no option's value, in no comment, and not after `--`."""
    before = ""
    for word in words:
        if word == "--" or word.startswith("#"):
            return False
        if word in flags and before not in OPTIONS_OF_ROLLOUTS:
            return True
        before = word
    return False


def copied_into(programs, cwd):
    """The folder that a copy is written to, which is not read; None where other programs may read it."""
    if len(programs) != 1 or programs[0][0] not in ("cp", "rsync", "scp"):
        return None
    words = programs[0][1]
    named = [word for word in words[1:] if not word.startswith("-")]
    has_option = any(re.match(r"-\w*t|--target", word) for word in words)
    return None if has_option or len(named) < 2 else os.path.realpath(os.path.join(cwd, named[-1].strip("'\"")))


def without_evsys(command):
    """The command without those parts that `evsys` gets: it scores test tasks and does not print them, except by
    `evsys data`."""
    parts = PARTS.split(command)
    for place in range(0, len(parts), 2):
        words = words_of(parts[place])
        if words[:1] == ["evsys"] and words[1:2] != ["data"]:
            parts[place] = " "
    return "".join(parts)


def shows_test_rows(command, cwd):
    """`evsys rollouts`, `query` and `data` print rows. What another config calls test is known to `--no-test` only."""
    closed = {os.path.basename(path)[: -len(".jsonl")] for path in protected_paths(find_project(cwd))
              if os.path.join(".evsys", "benchmarks") in path}  # fmt: skip
    closed |= {re.sub(r"-v\d+-\w+$", "", identity) for identity in closed}
    for words in calls_of_evsys(command, cwd):
        if words[:1] == ["data"] and words[1:2] in (["preview"], ["pull"]) and closed & set(words[2:]):
            return True
        if words[:1] == ["rollouts"] and not has_flag(words, {"--help", "-h", "--no-test"}):
            return True
        if words[:1] == ["query"] and re.search(r"\brollouts\b", command, re.I):
            return True
    is_program = re.search(r"\bpython[\d.]*\s+(?:-\w+\s+)*-\w*c\b", command) and "evsys" in command
    return bool(is_program and re.search(r"\brollouts\b", command) and not re.search(r"\bno.test\b", command))


def ask_git(folder, *words):
    """The lines that git prints; none where it fails."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", *words], cwd=folder, timeout=SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except OSError:
        return []  # no git, or no such folder: the command will fail as well
    return os.fsdecode(done.stdout).splitlines()


def tests_in_git(command, cwd):
    """A closed file that git would print from commits, stashes or objects."""
    for part in PARTS.split(fill_variables(command, command, cwd))[::2]:
        words = [re.sub(r"['\"\\]", "", word) for word in words_of(part)]
        if words[:1] != ["git"]:
            continue
        top = os.path.join(cwd, words[2]) if words[1:2] == ["-C"] and words[2:] else cwd
        words = words[3:] if words[1:2] == ["-C"] else words[1:]
        verb, rest = words[:1], words[1:]
        if any(word.startswith(GIT_SHOWS_NAMES) for word in rest):
            continue
        plain = [word for word in rest if word == "--" or not word.startswith("-")]
        objects = tuple(word for word in plain if re.fullmatch(r"[0-9a-f]{4,64}", word))
        tracked = []  # "<mode> <object> <stage>\t<name>"
        if verb == ["fast-export"] or (verb == ["cat-file"] and any(word.startswith("--batch") for word in rest)):
            tracked = ask_git(top, "ls-files", "--stage", "--full-name", ":/")
        elif verb in (["show"], ["cat-file"]) and objects:
            tracked = [line for line in ask_git(top, "ls-files", "--stage", "--full-name", ":/")
                       if line.split()[1].startswith(objects)]  # fmt: skip
        names = [line.partition("\t")[2] for line in tracked]
        if verb == ["stash"] and plain[:1] == ["show"]:
            names += ask_git(top, "stash", "show", "--name-only", *plain[1:])
        elif verb == ["diff"]:
            staged = ["--cached"] if {"--cached", "--staged"} & set(rest) else []
            names += ask_git(top, "diff", "--name-only", *staged, *plain)
        elif verb in (["show"], ["whatchanged"], ["format-patch"]) or (
            verb == ["log"] and any(re.match(r"-p|-u$|--patch|-[LGS]|--cc$|-c$", word) for word in rest)
        ):
            limits = [word for word in rest if re.match(r"-n?\d+$|--max-count=\d+$|--all$", word)]
            limits += ["-1"] if verb == ["show"] else []
            names += ask_git(top, "log", "--name-only", "--format=", *limits, *plain)
        root = (ask_git(top, "rev-parse", "--show-toplevel") or [top])[0] if names else top
        for name in dict.fromkeys(names):
            if why_protected(os.path.join(root, name), cwd):
                return name
    return None


def check_command(given, cwd):
    command = given.get("command")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    if not isinstance(command, str):
        return None
    if SHOWS_KEYS.search(command):
        return f"This would print keys of the environment. {KEY_ADVICE}"
    command = without_written_text(command)
    if shows_test_rows(command, cwd):
        return "This would show test tasks, too. Use `evsys rollouts <experiment> --no-test`."
    hit = tests_in_git(command, cwd)
    if hit:
        return f"This would print {hit} from git, which is closed to agents. Add `--stat`, or name the paths to " \
               f"show, such as `-- src experiments`. {TEST_ADVICE}"  # fmt: skip
    for words in calls_of_evsys(command, cwd):
        why = check_evsys(words, cwd, command)
        if why:
            return why
    programs = list(programs_of(command))
    reads_all = READS_ALL.search(command)
    is_plain = not reads_all and not re.search(r"\$\(|`|<(?!<)", command)
    if is_plain and programs and all(program in HARMLESS for program, words in programs):
        if not any(program == "evsys" and words[1:2] == ["data"] for program, words in programs):
            return None
    rest = without_evsys(command)
    hit = find_by_pattern(rest, cwd)
    if hit:
        return f"This would read {os.path.relpath(hit, cwd)}, which is closed to agents. {TEST_ADVICE}"
    target = copied_into(programs, cwd)
    for path in candidates(rest, cwd):
        why = why_protected(path, cwd)
        if why:
            return f"{os.path.relpath(path, cwd)} is closed to agents. {why}"
        if os.path.isdir(path) and reads_all and os.path.realpath(path) != target:
            inside = find_inside(path, cwd)
            if inside:
                shown = os.path.relpath(inside, cwd)
                return f"This would read {shown}, which is closed to agents.{SEARCH_ADVICE} {TEST_ADVICE}"
    if reads_all and re.search(
        r"\b(?:rg|ripgrep|ugrep|ag|ack|fd|fdfind|git\s+grep)\b|grep\b[^|;&\n]*\s-\w*[rR]", command
    ):
        named = [path for path in candidates(rest, cwd) if path != cwd]
        if not named:  # without a path these search the current folder
            inside = find_inside(cwd, cwd)
            if inside:
                shown = os.path.relpath(inside, cwd)
                return f"This would search {shown}, which is closed to agents.{SEARCH_ADVICE}"
    return None


def check(event):
    tool, given = event.get("tool_name") or "", event.get("tool_input") or {}
    cwd = os.path.abspath(event.get("cwd") or os.getcwd())
    if tool in ("Bash", "PowerShell", "shell", "local_shell", "exec_command", "run_shell_command", "Monitor"):
        return check_command(given, cwd)
    if tool in ("Grep", "search_file_content"):
        return check_grep(given, cwd)
    if tool in ("Glob", "LS"):
        return None  # names only
    return check_file(tool, given, cwd)


def event_of_cursor(event):
    """Cursor's event as one of Claude Code's; None where it is none of Cursor's."""
    name = event.get("hook_event_name")
    cwd = event.get("cwd") or (event.get("workspace_roots") or [None])[0]
    if name == "beforeShellExecution":
        return {"tool_name": "Bash", "tool_input": {"command": event.get("command")}, "cwd": cwd}
    if name == "beforeReadFile":
        return {"tool_name": "Read", "tool_input": {"file_path": event.get("file_path")}, "cwd": cwd}
    if name != "beforeMCPExecution":
        return None
    given = event.get("tool_input")
    given = json.loads(given) if isinstance(given, str) and given.strip() else given
    # A server is known by the command that started it; ours hands out no test rows.
    server = "evsys" if words_of(str(event.get("command") or ""))[:2] == ["evsys", "mcp"] else "other"
    return {"tool_name": f"mcp__{server}__{event.get('tool_name')}", "tool_input": given, "cwd": cwd}


def main():
    is_cursor = False
    try:
        event = json.load(sys.stdin)
        is_cursor = str(event.get("hook_event_name")).startswith("before")
        reason = check(event_of_cursor(event) or event)
    except Exception as exc:  # a command that breaks the guard must not pass for that
        reason = (
            f"The guard of the evsys plugin could not check this call ({type(exc).__name__}: {exc}). Write it simpler."
        )
    if is_cursor:
        denied = {"permission": "deny", "user_message": reason, "agent_message": reason}
        print(json.dumps(denied if reason else {"permission": "allow"}))
        return 0
    if reason:
        print(reason, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
