"""So many arms on one engine: `python -m contest.arms ARMS MODEL_DIR`.

In: anything, by pipe. Out: the tokens all arms trained on, seconds, peak memory. Every arm trains a step, saves its
weights, opens a sampler over them and samples: what an arm of an experiment does, all arms at once.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from contest.rows import make_steps
from contest.sample import make_prompts
from contest.sft import ALPHA, RANK, engine_step
from contest.turns import Turns
from evsys_engine.engine import Engine
from evsys_engine.types import LoraSettings, SampleRequest

STEPS = 1


def run_arm(engine: Engine, number: int, folder: Path) -> int:
    adapter = engine.create_adapter(LoraSettings(rank=RANK, alpha=ALPHA, seed=number))
    step = engine_step(adapter, make_steps("equal", STEPS))
    tokens = sum(step(n) for n in range(1, STEPS + 1))
    adapter.save_weights(folder / str(number))
    sampler = engine.load_sampler(folder / str(number))
    sampler.sample([SampleRequest(tokens=prompt, max_tokens=16, seed=number) for prompt in make_prompts(8)])
    sampler.close()
    adapter.close()
    return tokens


def main() -> None:
    arms, model_dir = int(sys.argv[1]), Path(sys.argv[2])
    turns = Turns()
    engine = Engine.load(model_dir, device="cpu", dtype="float32")

    def run(work: Any) -> int:
        with ThreadPoolExecutor(arms) as pool, tempfile.TemporaryDirectory() as folder:
            return sum(pool.map(lambda number: run_arm(engine, number, Path(folder)), range(arms)))

    turns.serve(run)


if __name__ == "__main__":
    main()
