"""Train a small convolutional network on scikit-learn's handwritten digits, in plain PyTorch.

python examples/digits_plain.py --steps 600
"""

from itertools import islice

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from arguments import steps_to_make
from digits_task import DigitsNet, correct, digits, parse_arguments
from tracker import Tracker


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)
    train, test = digits()
    steps = steps_to_make(args, len(train))
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
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

    # Then see how it does on digits that it has not learned from.
    model.eval()
    with torch.no_grad():
        hits = torch.cat([correct(model, batch) for batch in DataLoader(test, batch_size=args.batch_size)])
    print(f"test accuracy {hits.mean():.4f}")


if __name__ == "__main__":
    main()
