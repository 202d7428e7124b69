"""Compiles a grammar in a separate process, which is killed where that takes too long.

In: a grammar on stdin, seconds of CPU as the argument. Out: on stdout, why no completion can follow it; nothing where
one can. Run as a script, without evsys_sdk. Exit by SIGPROF: it took longer.
"""

from __future__ import annotations

import signal
import sys

import llguidance


def main() -> None:
    """Compiles one grammar."""
    grammar = sys.stdin.read()
    # By the kernel and by CPU time: llguidance cannot be interrupted, and a busy machine changes no answer.
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if matcher.is_error():
        print(matcher.get_error())
        return
    # A schema that leads nowhere (`{"$ref": "#"}`) is only noticed at the first token; bytes will do for that.
    matcher.compute_logit_bias()
    if matcher.is_error():
        print("no text has this form")


if __name__ == "__main__":
    main()
