"""Training script of every worker of a campaign: ``python -m examples.tiny_lm.train``.

To train another model, change what is between `load` and `submit`. The rest is how a worker takes
part: it begins each window with the shared weights, submits the change of its own weights, and
applies the merged update. A worker that was killed is started again, and joins the open window.
"""

import argparse

import torch

from examples.tiny_lm.model import LENGTH, TinyLM
from examples.tiny_lm.text import join_samples, read_text, sample_rows
from millrace.campaigns.worker import Worker
from millrace.gradients import TrainingWindow

BATCH_FILES, BATCH_ROWS, LEARNING_RATE, VALIDATION_ROWS = 8, 8, 2e-3, 48


def main(threads: int) -> None:
    """Train until the run ends."""
    torch.set_num_threads(threads)
    with Worker.from_environment() as worker:
        validation_text = read_text(worker.fetch_shards("val"))
        validation_rows = sample_rows(validation_text, VALIDATION_ROWS, LENGTH + 1)
        model = TinyLM()
        participant = worker.join(threads=threads)

        def begin(window: TrainingWindow) -> None:
            participant.load(model)
            with torch.no_grad():
                loss = float(model.loss(validation_rows))
            print(f"window {window.number}: step {window.step}, loss {loss:.3f}", flush=True)
            worker.begin_window(window, {"model": model.state_dict()}, loss=loss)

        for window in participant.iterate_windows():
            begin(window)
            seed = window.number * 1000 + worker.settings.number
            generator = torch.Generator().manual_seed(seed)
            optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
            batches = worker.load_batches(window, BATCH_FILES, decode=False)
            for batch in batches:
                rows = sample_rows(join_samples(batch), BATCH_ROWS, LENGTH + 1, generator)
                optimizer.zero_grad()
                model.loss(rows).backward()
                optimizer.step()
            tokens = window.steps * BATCH_ROWS * LENGTH
            participant.submit(model, tokens=tokens, samples=batches.digest)
            participant.receive(model)
        begin(participant.open_window)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="processors to use")
    main(parser.parse_args().threads)
