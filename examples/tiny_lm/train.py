"""Training script of every worker of a campaign: ``python -m examples.tiny_lm.train``.

To train something else, change what is between `load` and `submit`. The rest is how a worker takes
part: it begins each window with the weights of all, hands in how its own have changed, and waits
for what they come to. Killed at any moment, it is started again and joins where the run is.
"""

import argparse

import torch

from examples.tiny_lm.model import LENGTH, TinyLM
from examples.tiny_lm.text import rows_of, text_of
from millrace.campaigns.worker import Worker
from millrace.gradients import TrainingWindow

ROWS, RATE, HELD = 8, 2e-3, 48


def main(threads: int) -> None:
    """Take part until the run is over."""
    torch.set_num_threads(threads)
    with Worker.from_environment() as worker:
        train = text_of(worker.fetch_shards("train", only_own=True))
        held = rows_of(text_of(worker.fetch_shards("val")), HELD, LENGTH + 1)
        model = TinyLM()
        participant = worker.join(threads=threads)

        def begin(turn: TrainingWindow) -> None:
            participant.load(model)
            with torch.no_grad():
                loss = float(model.loss(held))
            print(f"window {turn.number}: step {turn.step}, loss {loss:.3f}", flush=True)
            worker.begin_window(turn, {"model": model.state_dict()}, loss=loss)

        for turn in participant.iterate_windows():
            begin(turn)
            dice = torch.Generator().manual_seed(turn.number * 1000 + worker.settings.number)
            optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
            for _ in range(turn.steps):
                optimizer.zero_grad()
                model.loss(rows_of(train, ROWS, LENGTH + 1, dice)).backward()
                optimizer.step()
            participant.submit(model, tokens=turn.steps * ROWS * LENGTH)
            participant.apply(model)
        begin(participant.open_window)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="processors to use")
    main(parser.parse_args().threads)
