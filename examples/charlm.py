"""Train a small transformer to write text character by character, on any number of workers.

python examples/charlm.py                                      on Python's own documentation strings
python examples/charlm.py --text FILE --epochs 3               on a text of yours
virtualflow run --workers 2 examples/charlm.py --steps 2000    two workers, and long enough to write words
"""

import torch
import torch.nn.functional as F

import virtualflow as vf
from arguments import steps_to_make
from charlm_task import CharacterModel, generate, parse_arguments, warm_up_then_cosine, window_losses, windows


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)
    train, held_out = windows(args.text)
    steps = steps_to_make(args, len(train))
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99))
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(steps))

    with vf.elastic(model, optimizer, train, batch_size=args.batch_size, steps=steps, scheduler=sched) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)

        # Then see how it does on the end of the text, which it has not learned from.
        losses = vf.evaluate(model, held_out, lambda batch: window_losses(model, batch), batch_size=args.batch_size)
        run.log(held_out_loss=losses.mean().item())
        if run.leader:
            print(f"held-out loss {losses.mean():.4f} nats a character; it writes:\n{generate(model)}")


if __name__ == "__main__":
    main()
