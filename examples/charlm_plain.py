"""Train a small transformer to write text character by character, in plain PyTorch.

python examples/charlm_plain.py
"""

from itertools import islice

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from arguments import steps_to_make
from charlm_task import CharacterModel, generate, parse_arguments, warm_up_then_cosine, window_losses, windows
from tracker import Tracker


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)
    train, held_out = windows(args.text)
    steps = steps_to_make(args, len(train))
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99))
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(steps))
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)

    with Tracker() as run:
        while run.steps < steps:
            for x, y in islice(loader, steps - run.steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                sched.step()
                run.log(loss=loss)

    # Then see how it does on the end of the text, which it has not learned from.
    model.eval()
    with torch.no_grad():
        losses = torch.cat([window_losses(model, batch) for batch in DataLoader(held_out, batch_size=args.batch_size)])
    print(f"held-out loss {losses.mean():.4f} nats a character; it writes:\n{generate(model)}")


if __name__ == "__main__":
    main()
