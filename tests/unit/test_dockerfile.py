"""What a Dockerfile asks for: its steps, its packages, and the lines that a machine without images cannot follow."""

from __future__ import annotations

import pytest

from evsys_sandbox.dockerfile import Step, fetches, missing_packages, recipe_of, steps_of, top_folder, what_is_missing
from evsys_sandbox.errors import DockerfileError


def words_of(text: str) -> list[tuple[str, ...]]:
    return [(step.kind, *step.words) for step in steps_of(text)]


def test_the_steps_of_a_dockerfile_in_order():
    text = """
    # a comment
    FROM python:3.12 AS base
    ENV A=1 B="two words"
    ENV C old form
    WORKDIR /srv/app
    COPY --chown=me a.txt b.txt /srv/app/
    RUN echo one && \\
        # in between
        echo two
    RUN ["echo", "a b"]
    EXPOSE 80
    CMD ["sleep"]
    """
    assert words_of(text) == [
        ("env", "A", "1"),
        ("env", "B", "two words"),
        ("env", "C", "old form"),
        ("workdir", "/srv/app"),
        ("copy", "a.txt", "b.txt", "/srv/app/"),
        ("run", "echo one &&  echo two"),
        ("run", "echo 'a b'"),
    ]
    assert steps_of("WORKDIR /x")[0] == Step(kind="workdir", words=("/x",))


def test_variables_of_the_dockerfile_are_put_into_its_paths():
    text = "ARG TOP=/srv\nENV HOME_OF=${TOP}/app\nWORKDIR $HOME_OF\nCOPY a ${HOME_OF}/\nRUN echo $TOP"
    assert words_of(text)[1:] == [
        ("env", "HOME_OF", "/srv/app"),
        ("workdir", "/srv/app"),
        ("copy", "a", "/srv/app/"),
        ("run", "echo $TOP"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "COPY --from=base /a /b",
        "ADD https://x.org/a /b",
        "FROM b",
        "ONBUILD RUN x",
        "COPY x",
        "WORKDIR $NOBODY_SAID",
        "COPY a ${NOBODY_SAID}",
    ],
)
def test_a_step_that_a_sandbox_cannot_do_is_refused_by_name(line):
    with pytest.raises(DockerfileError, match="sandbox"):
        steps_of(f"FROM a\n{line}\n")


HEREDOCS = """FROM a
ENV NAME=world
RUN <<EOF
set -e
echo one
cd /srv && echo two
EOF
RUN python3 - <<'PY' > out.txt
print("$NAME")
PY
COPY <<EOF <<"RAW" /app/
hello $NAME
EOF
hello $NAME
RAW
COPY --chmod=755 <<-SCRIPT run.sh
\t#!/bin/sh
\techo hi
\tSCRIPT
RUN <<EOF
apt-get update
apt-get install -y sh \\
    nosuch
if true; then
  pip install pip
fi
echo made > x
EOF
RUN echo "1<<2" && echo $((1<<3))
"""


def test_texts_that_stand_in_the_dockerfile_are_understood():
    steps = steps_of(HEREDOCS)
    assert [(step.kind, *step.words) for step in steps] == [
        ("env", "NAME", "world"),
        ("run", "set -e\necho one\ncd /srv && echo two"),
        ("run", "python3 - <<'PY' > out.txt\nprint(\"$NAME\")\nPY\n"),
        ("copy", "EOF", "RAW", "/app/"),
        ("copy", "SCRIPT", "run.sh"),
        ("system", "sh", "nosuch"),
        ("python", "pip"),
        ("run", ":\n:\nif true; then\n:\nfi\necho made > x"),
        ("run", 'echo "1<<2" && echo $((1<<3))'),
    ]
    assert [step.texts for step in steps if step.kind == "copy"] == [
        ("hello world\n", "hello $NAME\n"),
        ("#!/bin/sh\necho hi\n",),
    ]


def test_a_text_without_an_end_is_named():
    with pytest.raises(DockerfileError, match=r"`RUN <<EOF` of the Dockerfile has no end: add a line EOF"):
        steps_of("FROM a\nRUN <<EOF\necho one\n")


@pytest.mark.parametrize(
    ("command", "alias"),
    [
        ("ln -s /usr/bin/python3 /usr/bin/python", ("/usr/bin/python3", "python")),
        ("ln -sf python3 /usr/local/bin/python3.9", ("/usr/bin/python3", "python3.9")),
        ("ln -s -f /usr/bin/python3 /usr/local/bin/", ("/usr/bin/python3", "python3")),
        (
            "update-alternatives --install /usr/bin/python python /usr/bin/python3 1",
            ("/usr/bin/python3", "python"),
        ),
    ],
)
def test_a_link_to_an_interpreter_is_a_further_name_for_it(command, alias):
    assert words_of(f"FROM a\nRUN apt-get update && {command}\n") == [("alias", *alias)]
    assert [words[0] for words in words_of(f"RUN {command} && echo made > x")] == ["alias", "run"]


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("ln -s /usr/bin/python3 /usr/bin/python", None),
        ("set -e\n  ln -sf /usr/bin/python3 /usr/bin/python || true  # as images have it\necho x > y", "echo x > y"),
        ("apt-get update\nln -s /usr/bin/python3 /usr/bin/python\n", None),
        ("ln -s \\\n  /usr/bin/python3 \\\n  /usr/bin/python\necho x", "echo x"),
        ("if true; then ln -s /usr/bin/python3 /usr/bin/python; fi\necho x", "if true ; then : ; fi\necho x"),
        ("if true\nthen ln -s /usr/bin/python3 /usr/bin/python\nfi\necho x", "then :\nfi\necho x"),
        ("cd / && ln -s /usr/bin/python3 /usr/bin/python", "cd /"),
    ],
)
def test_a_link_to_an_interpreter_is_understood_in_a_script_of_the_dockerfile(script, left):
    found = words_of(f"FROM a\nRUN <<EOF\n{script}\nEOF\n")
    assert found[0] == ("alias", "/usr/bin/python3", "python")
    assert (left is None and len(found) == 1) or found[1][1].endswith(str(left))


@pytest.mark.parametrize(
    "script", ["ln -s /app/a /app/b\necho 'x \\\n y'", "for p in a b; do ln -s $p /usr/bin/$p; done"]
)
def test_a_script_with_other_links_stays_as_it_was_written(script):
    assert words_of(f"RUN <<EOF\n{script}\nEOF\n") == [("run", script)]


def test_other_links_are_the_shells_business_and_missing_interpreters_are_named():
    assert words_of("RUN ln -s /app/a /app/b && echo 'x;y'") == [("run", "ln -s /app/a /app/b && echo 'x;y'")]
    missing = missing_packages(steps_of("FROM a\nRUN ln -s /usr/bin/python2.4 /usr/bin/python"))
    assert missing is not None and "/usr/bin/python2.4" in missing


def test_the_path_of_the_image_can_be_added_to():
    assert words_of('ENV PATH="/opt/x:$PATH"')[0][2].startswith("/opt/x:/usr/local/sbin:")


def test_a_line_that_cannot_be_read_is_named():
    with pytest.raises(DockerfileError, match=r"`ENV A=\"open`.*quot"):
        steps_of('FROM a\nENV A="open')


def test_packages_are_told_from_what_else_a_command_does():
    text = (
        "RUN apt-get update && apt-get install -y --no-install-recommends git=1:2 jq && rm -rf /var/lib/apt/lists/*\n"
        "RUN cd /srv && pip install -q -i somewhere 'pytest>=8' numpy[x]; make all\n"
        "RUN apt-get clean\n"
    )
    assert words_of(text) == [
        ("system", "git", "jq"),
        ("python", "pytest", "numpy"),
        ("run", "cd /srv ; make all"),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /var/cache/x && echo 'a;b' > c; echo d",
        "if true; then apt-get install -y jq; fi",
        "pip install -r requirements.txt",
        "apt-get install -y $WANTED",
        "echo 'apt is a word' > said.txt",
    ],
)
def test_a_command_that_installs_no_packages_by_name_stays_whole(command):
    [(kind, kept)] = words_of(f"RUN {command}")
    assert kind == "run" and kept.replace(" ;", ";") == command


def test_a_recipe_adds_the_steps_up():
    recipe = recipe_of(
        "# syntax\nFROM python:3.12\nWORKDIR /srv\nWORKDIR app\nRUN apt-get update && \\\n"
        "    apt-get install -y --no-install-recommends git=1:2 jq \\\n"
        '    && rm -rf /var/lib/apt/lists/*\nRUN ["pip", "install", "-q", "pytest>=8", "numpy[x]"]\n'
        "RUN echo 'a;b' > c; echo d\nENV OLD form here\nCMD sleep\n"
    )
    assert recipe.workdir == "/srv/app" and recipe.env == {"OLD": "form here"} and not recipe.refused
    assert recipe.system_packages == ["git", "jq"] and recipe.python_packages == ["pytest", "numpy"]
    assert recipe.steps == ["echo 'a;b' > c; echo d"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("FROM x\nCOPY . /app", "`COPY . /app` needs an image built"),
        ("FROM x\nFROM y", "`FROM y` needs an image built"),
        ("FROM x\nRUN pip install -r requirements.txt", "requirements.txt` needs an image built"),
        ("FROM x\nRUN pip install no-such-thing-1==2 pip", "installs no-such-thing-1,"),
        ("FROM x\nRUN apt-get update && apt-get install -y no-such-package sh", "installs no-such-package,"),
        ("FROM x\nWORKDIR /usr", "`WORKDIR /usr` needs an image built"),
        ("FROM x\nWORKDIR /usr/src/app", "`WORKDIR /usr/src/app` needs an image built"),
        ("FROM x\nWORKDIR /", "`WORKDIR /` needs an image built"),
    ],
)
def test_what_an_image_would_have_and_this_machine_has_not_is_named(image, words):
    assert words in str(what_is_missing(image))


def test_what_this_machine_has_is_not_missed():
    assert missing_packages(steps_of("FROM x\nRUN apt-get install -y sh\nCOPY a /srv/")) is None
    assert what_is_missing("FROM x\nWORKDIR /srv\nRUN apt-get install -y sh && mkdir -p b") is None


@pytest.mark.parametrize(("path", "top"), [("/srv/app", "/srv"), ("/srv", "/srv"), ("/", ""), ("srv/app", "")])
def test_the_top_folder_of_a_path(path, top):
    assert top_folder(path) == top


@pytest.mark.parametrize("line", ["# pip install pytest", "pip --version", "grep https://x.org /app/curl.txt", "true"])
def test_a_script_that_fetches_nothing_may_speak_of_it(line):
    assert fetches(f"set -e\n{line}\n") is None


@pytest.mark.parametrize("line", ["apk add --no-cache jq", "pip3 install x", "git clone https://x.org/a"])
def test_a_script_that_fetches_is_told_by_its_line(line):
    assert fetches(f"set -e\n{line}\n") == line
