"""A hook whose one parameter is called `event` gets an event object; the positional form works as before."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from evsys_sdk.protocols import Callback, EvalResult, RunResult
from evsys_sdk.record.callbacks import EVENTS, HOOKS, CallbackList

CTX = SimpleNamespace(run_id="e/r")
ARGUMENTS = {
    "on_experiment_start": ("experiment",),
    "on_run_start": (CTX,),
    "on_train_start": (CTX, 7),
    "on_step": (CTX, 3, {"loss": 0.5}),
    "on_checkpoint": (CTX, 3, "/weights"),
    "on_eval": (CTX, EvalResult(name="t", split="val", scores=[])),
    "on_train_end": (CTX, {"loss": 0.1}),
    "on_run_end": (CTX, RunResult(run_id="e/r", status="completed")),
    "on_experiment_end": ([],),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_both_forms_hear_the_same(hook):
    events, positional = [], []
    by_event = type("ByEvent", (), {hook: lambda self, event: events.append(event)})()
    by_arguments = type("ByArguments", (), {hook: lambda self, *args: positional.append(args)})()
    getattr(CallbackList([("a", by_event), ("b", by_arguments)]), hook)(*ARGUMENTS[hook])
    assert positional == [ARGUMENTS[hook]]
    [event] = events
    assert type(event) is EVENTS[hook]
    assert tuple(getattr(event, field.name) for field in fields(event)) == ARGUMENTS[hook]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_event_has_the_arguments_of_the_positional_hook(hook):
    code = getattr(Callback, hook).__code__
    assert tuple(field.name for field in fields(EVENTS[hook])) == code.co_varnames[1 : code.co_argcount]


def test_an_event_hook_that_raises_is_reported_and_the_others_are_called():
    class Raises:
        def on_step(self, event):
            raise ValueError(f"at {event.step}")

    heard = []
    after = type("After", (), {"on_step": lambda self, event: heard.append(event.step)})()
    callbacks = CallbackList([("raises", Raises()), ("after", after)])
    callbacks.on_step(*ARGUMENTS["on_step"])
    assert heard == [3] and callbacks.errors == ["callback raises.on_step (run e/r): ValueError: at 3"]
